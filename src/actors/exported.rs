//! What a lane needs to know of the file system that is exported.

use crate::config::Network;
use crate::programs::nfs::{Client, Export};
use std::net::IpAddr;
use std::sync::Arc;

/// The one export of a daemon, and who may use it.
#[derive(Clone, Debug)]
pub struct Exported {
    pub export: Arc<Export>,
    /// Networks whose hosts are served; empty: all.
    allow: Arc<[Network]>,
}

impl Exported {
    pub fn new(export: Arc<Export>, allow: &[Network]) -> Self {
        Self { export, allow: allow.into() }
    }

    /// A peer as the file system knows it.
    pub fn client(&self, address: IpAddr) -> Client {
        let is_allowed = self.allow.is_empty() || self.allow.iter().any(|network| network.contains(address));
        Client { address, is_allowed }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::programs::nfs::Rules;
    use crate::programs::nfs::export::tests::export;

    #[test]
    fn whoever_is_of_no_network_is_not_allowed_and_without_networks_everybody_is() {
        let export = Arc::new(export(Rules::default()));
        let may = |allow: &[&str], address: &str| {
            let allow: Vec<Network> = allow.iter().map(|network| network.parse().unwrap()).collect();
            Exported::new(export.clone(), &allow).client(address.parse().unwrap()).is_allowed
        };
        assert!(may(&["10.0.0.0/8", "::1"], "10.9.8.7") && may(&["10.0.0.0/8", "::1"], "::1"));
        assert!(may(&["10.0.0.0/8"], "::ffff:10.0.0.1"), "an IPv4 address in an IPv6 socket is what it is");
        assert!(!may(&["10.0.0.0/8", "::1"], "127.0.0.1"));
        assert!(may(&[], "192.0.2.7"));
    }
}
