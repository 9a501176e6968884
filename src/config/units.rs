//! Values of the configuration that carry a unit or a word: `"256KiB"`, `"5s"`, `"auto"`, `"off"`.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serializer, de};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// A number of octets: `"256KiB"`, `"4GiB"`, `"4096"`, at most 2^63 - 1.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct ByteSize(pub u64);

const SIZE_UNITS: [(&str, u64); 5] = [("KiB", KIB), ("MiB", MIB), ("GiB", GIB), ("TiB", 1 << 40), ("PiB", 1 << 50)];

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is not a size: want octets or a number with KiB, MiB, GiB, TiB or PiB");
        let text = text.trim();
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let unit = unit.trim_start();
        let scale = match SIZE_UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit)) {
            Some((_, scale)) => *scale,
            None if unit.is_empty() || unit.eq_ignore_ascii_case("B") => 1,
            None => return Err(wrong()),
        };
        let number: u64 = number.parse().map_err(|_| wrong())?;
        let bytes = number.checked_mul(scale).filter(|bytes| *bytes <= i64::MAX as u64);
        bytes.map(Self).ok_or_else(|| format!("`{text}` is more than 2^63 - 1 octets"))
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exact = SIZE_UNITS.iter().rev().find(|(_, scale)| self.0 != 0 && self.0.is_multiple_of(*scale));
        match exact {
            Some((unit, scale)) => write!(f, "{}{unit}", self.0 / scale),
            None => write!(f, "{}", self.0),
        }
    }
}

/// A length of time: `"100ms"`, `"5s"`, `"2m"`, `"1h"`, `"7d"`.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct TimeSpan(pub Duration);

const TIME_UNITS_US: [(&str, u64); 6] =
    [("us", 1), ("ms", 1_000), ("s", 1_000_000), ("m", 60_000_000), ("h", 3_600_000_000), ("d", 86_400_000_000)];

impl FromStr for TimeSpan {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is not a time: want a number with us, ms, s, m, h or d");
        let text = text.trim();
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let (_, scale) = TIME_UNITS_US.iter().find(|(name, _)| *name == unit.trim_start()).ok_or_else(wrong)?;
        let number: u64 = number.parse().map_err(|_| wrong())?;
        let us = number.checked_mul(*scale).ok_or_else(wrong)?;
        Ok(Self(Duration::from_micros(us)))
    }
}

impl fmt::Display for TimeSpan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let us = self.0.as_micros();
        // Seconds are what people expect to read back, so larger units are taken on the way in only.
        let (unit, scale) = if us.is_multiple_of(1_000_000) {
            ("s", 1_000_000)
        } else if us.is_multiple_of(1_000) {
            ("ms", 1_000)
        } else {
            ("us", 1)
        };
        write!(f, "{}{unit}", us / scale)
    }
}

/// A value, or `"auto"`: worked out from the machine at start.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Auto<T> {
    #[default]
    Auto,
    Set(T),
}

/// A value, or `"off"`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Switch<T> {
    Off,
    On(T),
}

impl<T> Switch<T> {
    /// `None` if it is off.
    pub fn into_option(self) -> Option<T> {
        match self {
            Self::Off => None,
            Self::On(value) => Some(value),
        }
    }
}

impl<T> From<Option<T>> for Switch<T> {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Off, Self::On)
    }
}

impl<T: FromStr<Err: fmt::Display>> FromStr for Auto<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        text.parse().map(Self::Set).map_err(|err: T::Err| format!("{err} (or `auto`)"))
    }
}

impl<T: FromStr<Err: fmt::Display>> FromStr for Switch<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "off" {
            return Ok(Self::Off);
        }
        text.parse().map(Self::On).map_err(|err: T::Err| format!("`{text}`: {err} (or `off`)"))
    }
}

impl<T: fmt::Display> fmt::Display for Auto<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Set(value) => value.fmt(f),
        }
    }
}

impl<T: fmt::Display> fmt::Display for Switch<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::On(value) => value.fmt(f),
        }
    }
}

/// Text form of a scalar. A number in TOML and a string in the environment are the same thing here.
pub(super) mod text {
    use super::*;

    pub fn serialize<T: fmt::Display, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
        let text = value.to_string();
        match text.parse::<u64>() {
            Ok(number) => serializer.serialize_u64(number),
            Err(_) => serializer.serialize_str(&text),
        }
    }

    pub fn deserialize<'de, T: FromStr<Err: fmt::Display>, D: Deserializer<'de>>(from: D) -> Result<T, D::Error> {
        from.deserialize_any(Scalar)?.parse().map_err(de::Error::custom)
    }

    struct Scalar;

    impl de::Visitor<'_> for Scalar {
        type Value = String;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a string or a whole number")
        }

        fn visit_str<E: de::Error>(self, value: &str) -> Result<String, E> {
            Ok(value.to_owned())
        }

        fn visit_i64<E: de::Error>(self, value: i64) -> Result<String, E> {
            Ok(value.to_string())
        }

        fn visit_u64<E: de::Error>(self, value: u64) -> Result<String, E> {
            Ok(value.to_string())
        }
    }
}

/// A list in TOML; in the environment, items with commas between them.
pub(super) mod list {
    use std::marker::PhantomData;

    use super::*;

    pub fn deserialize<'de, T, D>(from: D) -> Result<Vec<T>, D::Error>
    where
        T: Deserialize<'de> + FromStr<Err: fmt::Display>,
        D: Deserializer<'de>,
    {
        from.deserialize_any(List(PhantomData))
    }

    struct List<T>(PhantomData<T>);

    impl<'de, T: Deserialize<'de> + FromStr<Err: fmt::Display>> de::Visitor<'de> for List<T> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list")
        }

        fn visit_str<E: de::Error>(self, text: &str) -> Result<Vec<T>, E> {
            let is_off = text.split(',').any(|item| item.trim() == "off");
            let items: Vec<_> =
                text.split(',').map(str::trim).filter(|item| !item.is_empty() && *item != "off").collect();
            if is_off && !items.is_empty() {
                return Err(E::custom(format!("`{text}`: off, or addresses, but not both")));
            }
            items.into_iter().map(|item| item.parse().map_err(|err| E::custom(format!("`{item}`: {err}")))).collect()
        }

        fn visit_seq<A: de::SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<T>, A::Error> {
            let mut items = Vec::new();
            while let Some(item) = seq.next_element()? {
                items.push(item);
            }
            Ok(items)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_times_print_what_they_parse() {
        for text in ["0", "1", "4095", "256KiB", "4GiB", "1025KiB", "3TiB", "1PiB"] {
            assert_eq!(text.parse::<ByteSize>().unwrap().to_string(), text);
        }
        assert_eq!("5 mib".parse(), Ok(ByteSize(5 * MIB)));
        assert_eq!("12B".parse(), Ok(ByteSize(12)));
        for text in ["", "KiB", "1KB", "1.5GiB", "-1", "0x10", "99999999999999999999"] {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
        for text in ["0s", "1s", "100ms", "7us", "90s"] {
            assert_eq!(text.parse::<TimeSpan>().unwrap().to_string(), text);
        }
        assert_eq!("1h".parse(), Ok(TimeSpan(Duration::from_secs(3600))));
        for text in ["", "5", "s", "1.5s", "9999999999999999999d"] {
            assert!(text.parse::<TimeSpan>().is_err(), "{text}");
        }
    }
}
