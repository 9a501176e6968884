//! Who may connect to a native door, judged by address alone and before anything else of a peer is looked at.

use crate::config::Network;
use crate::fabric::Address;
use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// An address is named in the log once in this time, however often it comes.
const SAID_EVERY: Duration = Duration::from_secs(60);
/// Addresses remembered for that. More in a minute are counted, and not named.
const ADDRESSES_MAX: usize = 1024;

/// What becomes of a peer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Verdict {
    Admit,
    /// `log`: it is to be named in the log, with the number of its refusals since it was last.
    Refuse {
        log: Option<u64>,
    },
}

/// The judge of one door.
#[derive(Debug)]
pub struct Gate {
    /// `None`: everybody who gets here.
    networks: Option<Vec<Network>>,
    named: HashMap<IpAddr, Named>,
}

#[derive(Debug)]
struct Named {
    at: Instant,
    refused_since: u64,
}

impl Gate {
    /// For a door bound to `door`. No network at all admits everybody, and so does a door that only this host reaches.
    pub fn new(door: &Address, networks: &[Network]) -> Self {
        let networks = (!is_local(door) && !networks.is_empty()).then(|| networks.to_vec());
        Self { networks, named: HashMap::new() }
    }

    /// Peers of other hosts come in, whoever they are.
    pub fn is_open(door: &Address, networks: &[Network]) -> bool {
        !is_local(door) && networks.is_empty()
    }

    /// Judges a peer that asks at `now`.
    pub fn judge(&mut self, peer: &Address, now: Instant) -> Verdict {
        let Some(networks) = &self.networks else { return Verdict::Admit };
        let Address::Socket(peer) = peer else { return Verdict::Refuse { log: None } };
        let peer = peer.ip().to_canonical();
        if networks.iter().any(|network| network.contains(peer)) {
            return Verdict::Admit;
        }
        Verdict::Refuse { log: self.note(peer, now) }
    }

    fn note(&mut self, peer: IpAddr, now: Instant) -> Option<u64> {
        let is_fresh = |named: &Named| now.saturating_duration_since(named.at) < SAID_EVERY;
        if let Some(named) = self.named.get_mut(&peer) {
            named.refused_since += 1;
            if is_fresh(named) {
                return None;
            }
            named.at = now;
            return Some(std::mem::take(&mut named.refused_since));
        }
        if self.named.len() >= ADDRESSES_MAX {
            self.named.retain(|_, named| is_fresh(named));
        }
        if self.named.len() >= ADDRESSES_MAX {
            return None;
        }
        self.named.insert(peer, Named { at: now, refused_since: 0 });
        Some(1)
    }
}

/// Only this host reaches it.
fn is_local(door: &Address) -> bool {
    match door {
        Address::Socket(address) => address.ip().to_canonical().is_loopback(),
        Address::Name(_) => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> Address {
        Address::Socket(text.parse().unwrap())
    }

    fn gate(door: &str, networks: &[&str]) -> Gate {
        let networks: Vec<Network> = networks.iter().map(|network| network.parse().unwrap()).collect();
        Gate::new(&at(door), &networks)
    }

    #[test]
    fn a_list_admits_its_networks_and_nobody_else() {
        let now = Instant::now();
        let mut gate = gate("0.0.0.0:1", &["10.0.0.0/8", "fd00::/8"]);
        for peer in ["10.0.0.1:5", "10.255.255.255:5", "[::ffff:10.0.0.1]:5", "[fd00::1]:5"] {
            assert_eq!(gate.judge(&at(peer), now), Verdict::Admit, "{peer}");
        }
        for peer in ["127.0.0.1:5", "[::1]:5", "11.0.0.1:5", "[fe80::1]:5", "[::ffff:11.0.0.2]:5"] {
            assert_eq!(gate.judge(&at(peer), now), Verdict::Refuse { log: Some(1) }, "{peer}");
        }
        assert_eq!(gate.judge(&Address::Name("a".to_owned()), now), Verdict::Refuse { log: None });
    }

    #[test]
    fn without_a_list_or_on_loopback_everybody_who_gets_here_is_admitted() {
        for (door, networks) in [
            ("192.0.2.1:1", &[][..]),
            ("127.0.0.1:1", &["10.0.0.0/8"]),
            ("[::1]:1", &["10.0.0.0/8"]),
            ("[::ffff:127.0.0.1]:1", &["10.0.0.0/8"]),
        ] {
            assert_eq!(gate(door, networks).judge(&at("203.0.113.1:5"), Instant::now()), Verdict::Admit, "{door}");
        }
        let mut named = Gate::new(&Address::Name("a".to_owned()), &["10.0.0.0/8".parse().unwrap()]);
        assert_eq!(named.judge(&Address::Name("b".to_owned()), Instant::now()), Verdict::Admit);
    }

    #[test]
    fn an_address_is_named_once_a_minute_with_its_count() {
        let start = Instant::now();
        let mut gate = gate("192.0.2.1:1", &["10.0.0.0/8"]);
        let mut ask = |peer: &str, ms: u64| gate.judge(&at(peer), start + Duration::from_millis(ms));
        assert_eq!(ask("203.0.113.1:5", 0), Verdict::Refuse { log: Some(1) });
        for ms in [1, 30_000, 59_999] {
            assert_eq!(ask("203.0.113.1:6", ms), Verdict::Refuse { log: None }, "the port is no other peer");
        }
        assert_eq!(
            ask("203.0.113.2:5", 50_000),
            Verdict::Refuse { log: Some(1) },
            "another address has its own minute"
        );
        assert_eq!(ask("203.0.113.1:5", 60_000), Verdict::Refuse { log: Some(4) });
        assert_eq!(ask("203.0.113.1:5", 119_999), Verdict::Refuse { log: None });
    }

    #[test]
    fn a_flood_of_addresses_is_neither_logged_nor_remembered_without_end() {
        let start = Instant::now();
        let mut gate = gate("192.0.2.1:1", &["10.0.0.0/8"]);
        let flood = |gate: &mut Gate, now| {
            let peers = (0..2 * ADDRESSES_MAX as u32).map(|n| Address::Socket((n.to_be_bytes(), 1).into()));
            peers.filter(|peer| gate.judge(peer, now) == Verdict::Refuse { log: Some(1) }).count()
        };
        // 0.0.x.y lies outside of the list.
        assert_eq!(flood(&mut gate, start), ADDRESSES_MAX);
        assert_eq!(gate.named.len(), ADDRESSES_MAX);
        assert_eq!(gate.judge(&at("203.0.113.1:5"), start), Verdict::Refuse { log: None });
        let later = start + SAID_EVERY;
        assert_eq!(gate.judge(&at("203.0.113.1:5"), later), Verdict::Refuse { log: Some(1) }, "old ones make room");
        assert_eq!(gate.named.len(), 1);
    }
}
