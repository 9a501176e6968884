//! placeholder
/// Where an extent lies.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ExtentId {
    pub drive: u16,
    pub file: u16,
    pub offset: u32,
    pub order: u8,
}
