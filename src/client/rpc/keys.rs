//! Program `bulkhead`, blocking: what is known of keys, and what is done to them without their values.

use std::collections::VecDeque;
use std::time::Duration;

use super::RpcClient;
use super::objects::{refused, ttl_s};
use super::operation::{self, OfKeys, Operation};
use crate::client::ClientError;
use crate::programs::bulkhead::{Answer, Entry, LIST_ENTRIES_MAX, Page, PinnedVersion, Stat, Status};

impl RpcClient {
    /// What is known of each key, in the order of `keys`.
    ///
    /// # Errors
    /// As [`get_ranges`](Self::get_ranges).
    pub fn stats<K: AsRef<[u8]>>(&mut self, keys: &[K]) -> Result<Vec<Stat>, ClientError> {
        let mut found = Vec::with_capacity(keys.len());
        self.ask_keys(OfKeys::Stat { until_miss: false }, keys, |answer| {
            if let Answer::Stat { stats, .. } = answer {
                found.extend(stats);
            }
        })?;
        Ok(found)
    }

    /// What is known of a value; `None` is a miss.
    ///
    /// # Errors
    /// As [`stats`](Self::stats).
    pub fn stat(&mut self, key: impl AsRef<[u8]>) -> Result<Option<Stat>, ClientError> {
        Ok(self.stats(&[key])?.into_iter().next().filter(|stat| stat.status == Status::Ok))
    }

    /// How many of `keys` are there, from the first on, up to the first that is not.
    ///
    /// # Errors
    /// As [`stats`](Self::stats).
    pub fn leading<K: AsRef<[u8]>>(&mut self, keys: &[K]) -> Result<usize, ClientError> {
        let terms = self.terms()?;
        let mut count = 0;
        for (of, operation) in operation::of_keys(OfKeys::Stat { until_miss: true }, keys, &terms)? {
            let Answer::Stat { leading, .. } = self.run(operation)? else { continue };
            count += leading as usize;
            if (leading as usize) < of.len() {
                break;
            }
        }
        Ok(count)
    }

    /// Removes values, whatever their version. One status for each key.
    ///
    /// # Errors
    /// As [`stats`](Self::stats).
    pub fn delete_all<K: AsRef<[u8]>>(&mut self, keys: &[K]) -> Result<Vec<Status>, ClientError> {
        self.statuses(OfKeys::Delete, keys)
    }

    /// Removes a value; `false` if there was none.
    ///
    /// # Errors
    /// As [`stats`](Self::stats).
    pub fn delete(&mut self, key: impl AsRef<[u8]>) -> Result<bool, ClientError> {
        yes_or_no(&self.delete_all(&[key])?)
    }

    /// Removes one version of a value.
    ///
    /// # Errors
    /// As [`stats`](Self::stats).
    pub fn delete_version(&mut self, key: impl AsRef<[u8]>, version: u64) -> Result<Status, ClientError> {
        let operation = operation::delete_version(key.as_ref(), version)?;
        Ok(first_status(&self.run(operation)?))
    }

    /// Gives values a new time to live (`None`: for ever). One status for each key.
    ///
    /// # Errors
    /// As [`stats`](Self::stats).
    pub fn touch_all<K: AsRef<[u8]>>(&mut self, keys: &[K], ttl: Option<Duration>) -> Result<Vec<Status>, ClientError> {
        self.statuses(OfKeys::Touch { ttl_s: ttl_s(ttl) }, keys)
    }

    /// Gives a value a new time to live (`None`: for ever); `false` if there is none.
    ///
    /// # Errors
    /// As [`stats`](Self::stats).
    pub fn touch(&mut self, key: impl AsRef<[u8]>, ttl: Option<Duration>) -> Result<bool, ClientError> {
        yes_or_no(&self.touch_all(&[key], ttl)?)
    }

    /// Keeps values from being evicted, until [`unpin`](Self::unpin) or the end of the connection. A connection that is
    /// made anew has no pins.
    ///
    /// # Errors
    /// As [`stats`](Self::stats).
    pub fn pin<K: AsRef<[u8]>>(&mut self, keys: &[K]) -> Result<Vec<PinnedVersion>, ClientError> {
        let mut found = Vec::with_capacity(keys.len());
        self.ask_keys(OfKeys::Pin, keys, |answer| {
            if let Answer::Pin(pinned) = answer {
                found.extend(pinned);
            }
        })?;
        Ok(found)
    }

    /// Ends what [`pin`](Self::pin) began. One status for each key.
    ///
    /// # Errors
    /// As [`stats`](Self::stats).
    pub fn unpin<K: AsRef<[u8]>>(&mut self, keys: &[K]) -> Result<Vec<Status>, ClientError> {
        self.statuses(OfKeys::Unpin, keys)
    }

    /// One page of the keys that begin with `prefix`, in the order of their octets, behind `cookie` (empty: from the first
    /// on): [`Page::next`] is the next one's, and empty where there is none.
    ///
    /// # Errors
    /// As [`stats`](Self::stats).
    pub fn list_page(
        &mut self,
        prefix: impl AsRef<[u8]>,
        cookie: impl AsRef<[u8]>,
        count_max: u32,
    ) -> Result<Page, ClientError> {
        let terms = self.terms()?;
        match self.run(Operation::list(prefix.as_ref(), cookie.as_ref(), count_max, &terms)?)? {
            Answer::List(page) if page.status == Status::Ok => Ok(page),
            Answer::List(page) => Err(refused(page.status)),
            answer => unreachable!("{answer:?} to a LIST"),
        }
    }

    /// All keys that begin with `prefix`, in the order of their octets. What is there all the time comes once.
    pub fn list(&mut self, prefix: impl AsRef<[u8]>) -> KeyIter<'_> {
        let (entries, next) = (VecDeque::new(), Some(Vec::new()));
        KeyIter { client: self, prefix: prefix.as_ref().to_vec(), entries, next }
    }

    fn ask_keys<K: AsRef<[u8]>>(
        &mut self,
        what: OfKeys,
        keys: &[K],
        mut take: impl FnMut(Answer),
    ) -> Result<(), ClientError> {
        let terms = self.terms()?;
        let calls = operation::of_keys(what, keys, &terms)?;
        let under_way = self.submit_all(calls);
        self.settle_all(under_way, |_, _, answer| take(answer))
    }

    fn statuses<K: AsRef<[u8]>>(&mut self, what: OfKeys, keys: &[K]) -> Result<Vec<Status>, ClientError> {
        let mut found = Vec::with_capacity(keys.len());
        self.ask_keys(what, keys, |answer| {
            if let Answer::Statuses(statuses) = answer {
                found.extend(statuses);
            }
        })?;
        Ok(found)
    }
}

fn first_status(answer: &Answer) -> Status {
    match answer {
        Answer::Statuses(statuses) => statuses.first().copied().unwrap_or(Status::NotFound),
        _ => Status::NotFound,
    }
}

pub(super) fn yes_or_no(statuses: &[Status]) -> Result<bool, ClientError> {
    match statuses.first() {
        Some(Status::Ok) => Ok(true),
        Some(Status::NotFound) | None => Ok(false),
        Some(status) => Err(refused(*status)),
    }
}

/// The keys that begin with a prefix, see [`RpcClient::list`]. After an error there are no more.
#[derive(Debug)]
pub struct KeyIter<'a> {
    client: &'a mut RpcClient,
    prefix: Vec<u8>,
    entries: VecDeque<Entry>,
    /// Behind which key the next page begins; `None` when there is none.
    next: Option<Vec<u8>>,
}

impl Iterator for KeyIter<'_> {
    type Item = Result<Entry, ClientError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(entry) = self.entries.pop_front() {
                return Some(Ok(entry));
            }
            let cookie = self.next.take()?;
            match self.client.list_page(&self.prefix, cookie, LIST_ENTRIES_MAX as u32) {
                Ok(page) => {
                    self.next = (!page.next.is_empty()).then_some(page.next);
                    self.entries = page.entries.into();
                }
                Err(error) => return Some(Err(error)),
            }
        }
    }
}
