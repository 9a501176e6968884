//! The fabric's log in words that are the same in every run: names of queue pairs, keys and addresses are not.

use bulkhead::fabric::traced::{Entry, What};
use bulkhead::fabric::{QpNum, RemoteKey};
use bulkhead::wire::native::descriptor::Descriptor;

/// Queue pairs and keys, numbered as they come.
#[derive(Default)]
pub struct Names {
    queue_pairs: Vec<QpNum>,
    /// With the address that the peer is told.
    regions: Vec<(RemoteKey, u64)>,
}

impl Names {
    pub fn line(&mut self, entry: Entry) -> String {
        let qp = entry.qp.map_or("-".to_owned(), |qp| self.queue_pair(qp).to_string());
        let what = match entry.what {
            What::Admitted { .. } => "Admitted".to_owned(),
            What::ConnectRequest { .. } => "ConnectRequest".to_owned(),
            What::Registered { key, len, access } => {
                self.regions.push((key, 0));
                format!("Registered {} of {len}: {access:?}", self.regions.len() - 1)
            }
            What::Establishing { private_data } => {
                let own = Descriptor::decode(&private_data).expect("a descriptor of ours");
                for at in [own.ring_at, own.bulk_at] {
                    let region = self.region(at.key);
                    self.regions[region].1 = at.address;
                }
                format!("Establishing {:?} {:?}", own.ring, own.windows)
            }
            What::Posted { id, kind, len, target, inline, flags } => {
                let (key, address) = target.expect("Writes and Reads alone");
                let region = self.region(key);
                let offset = address - self.regions[region].1;
                let inline = inline.unwrap_or_default();
                let octets = inline.escape_ascii();
                format!("Posted {} {kind:?} of {len} to {region} + {offset}: {octets} {flags:?}", id.index)
            }
            What::Written { key } => format!("Written {}", self.region(key)),
            what => format!("{what:?}"),
        };
        format!("qp {qp}: {what}")
    }

    fn queue_pair(&mut self, number: QpNum) -> usize {
        self.queue_pairs.iter().position(|known| *known == number).unwrap_or_else(|| {
            self.queue_pairs.push(number);
            self.queue_pairs.len() - 1
        })
    }

    /// The newest of this name: keys are random, and an old one may come again.
    fn region(&self, key: RemoteKey) -> usize {
        self.regions.iter().rposition(|(known, _)| *known == key).expect("registered before")
    }
}
