//! The shape of what `serve` and `pool init` call. To connect them: delete this file, and import
//! `bulkhead::actors::{Handle, StartError, start}` and `bulkhead::store::pool::{PoolError, init}` where it is named.

use std::path::Path;

use bulkhead::config::Config;
use bulkhead::error::Exit;

#[derive(Debug, thiserror::Error)]
#[error("this build has no {0}")]
pub struct Absent(&'static str);

pub type StartError = Absent;
pub type PoolError = Absent;

impl Absent {
    pub const fn exit_code(&self) -> Exit {
        Exit::Unavailable
    }
}

/// Cannot be made in this build.
pub enum Handle {}

impl Handle {
    pub fn doors(&self) -> &[String] {
        match *self {}
    }

    pub fn memory_sum(&self) -> String {
        match *self {}
    }

    pub async fn shutdown(self) {
        match self {}
    }
}

pub async fn start(_: Config) -> Result<Handle, StartError> {
    Err(Absent("daemon"))
}

pub fn init(_: &Path) -> Result<(), PoolError> {
    Err(Absent("pools"))
}
