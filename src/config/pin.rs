//! `pin` as it is written: `"off"`, `"auto"`, `[0, 2]`, or what the environment can say of a list, `"0,2,8-11"`.

use std::fmt;

use serde::{Deserializer, Serialize, Serializer, de};

use crate::machine::numa::Pin;

pub fn serialize<S: Serializer>(pin: &Pin, to: S) -> Result<S::Ok, S::Error> {
    match pin {
        Pin::Cores(cores) => cores.serialize(to),
        word => to.collect_str(word),
    }
}

pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Pin, D::Error> {
    from.deserialize_any(Written)
}

struct Written;

impl<'de> de::Visitor<'de> for Written {
    type Value = Pin;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("\"off\", \"auto\" or a list of cores")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Pin, E> {
        text.parse().map_err(E::custom)
    }

    fn visit_i64<E: de::Error>(self, core: i64) -> Result<Pin, E> {
        self.visit_str(&core.to_string())
    }

    fn visit_u64<E: de::Error>(self, core: u64) -> Result<Pin, E> {
        self.visit_str(&core.to_string())
    }

    fn visit_seq<A: de::SeqAccess<'de>>(self, mut seq: A) -> Result<Pin, A::Error> {
        let mut cores = Vec::new();
        while let Some(core) = seq.next_element::<u64>()? {
            cores.push(core.to_string());
        }
        self.visit_str(&cores.join(","))
    }
}
