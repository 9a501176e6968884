//! What arguments and results are made of (RFC 1813 §2.5, §2.6). Types have our words, fields those of the RFC.

use super::{FILE_HANDLE_BYTES_MAX, NAME_BYTES_MAX, NAME_BYTES_READ_MAX};
use crate::wire::codec::{Codec, Reader, Writer, XdrError, codec_enum, codec_newtype, codec_struct};
use std::fmt;
use std::time::Duration;

codec_enum! {
    /// Why a procedure did not do what it was asked: nfsstat3 but for NFS3_OK, which is no error (§2.6).
    pub enum NfsError, "an error" {
        /// Only the owner or the super-user may.
        Perm = 1,
        NoEnt = 2,
        Io = 5,
        Nxio = 6,
        /// The caller may not.
        Acces = 13,
        Exist = 17,
        Xdev = 18,
        NoDev = 19,
        NotDir = 20,
        IsDir = 21,
        Inval = 22,
        FBig = 27,
        NoSpc = 28,
        Rofs = 30,
        MLink = 31,
        NameTooLong = 63,
        NotEmpty = 66,
        DQuot = 69,
        /// What the handle named is not there any more.
        Stale = 70,
        Remote = 71,
        /// No server made this handle.
        BadHandle = 10001,
        /// The guard of a SETATTR does not hold.
        NotSync = 10002,
        BadCookie = 10003,
        NotSupp = 10004,
        /// What was asked for does not fit the room there is for it.
        TooSmall = 10005,
        ServerFault = 10006,
        BadType = 10007,
        /// Later: the client waits and asks again, as another call.
        Jukebox = 10008,
    }
}

codec_enum! {
    /// ftype3.
    pub enum FileType, "a file type" {
        Regular = 1,
        Directory = 2,
        Block = 3,
        Character = 4,
        SymbolicLink = 5,
        Socket = 6,
        Fifo = 7,
    }
}

codec_enum! {
    /// stable_how: what must rest on stable storage before a WRITE is answered, or what does (§3.3.7).
    pub enum Stable, "a stability" {
        Unstable = 0,
        DataSync = 1,
        FileSync = 2,
    }
}

codec_newtype! {
    /// Number of an object in its file system. Unix clients take 0 for none (§3.3.16).
    #[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
    pub struct FileId(u64);
}

codec_newtype! {
    /// Where a directory is read on: 0 from the start, else that of the entry before (§3.3.16).
    #[derive(Clone, Copy, Debug, Eq, PartialEq)]
    pub struct Cookie(u64);
}

codec_newtype! {
    /// What a cookie is good for: zero with the first, then what the server gave with it (§3.3.16).
    #[derive(Clone, Copy, Debug, Eq, PartialEq)]
    pub struct CookieVerifier([u8; 8]);
}

codec_newtype! {
    /// Tells an exclusive CREATE from another client's (§3.3.8).
    #[derive(Clone, Copy, Debug, Eq, PartialEq)]
    pub struct CreateVerifier([u8; 8]);
}

codec_newtype! {
    /// Changes when unstable writes may be lost (§3.3.7).
    #[derive(Clone, Copy, Debug, Eq, PartialEq)]
    pub struct WriteVerifier([u8; 8]);
}

codec_struct! {
    /// nfstime3: since the beginning of 1970, UTC.
    #[derive(Clone, Copy, Debug, Eq, PartialEq)]
    pub struct Time {
        pub seconds: u32,
        /// A client may send any: see [`Time::since_epoch`].
        pub nseconds: u32,
    }
}

impl Time {
    /// `None` if the nanoseconds are a second or more.
    pub const fn since_epoch(self) -> Option<Duration> {
        if self.nseconds < 1_000_000_000 { Some(Duration::new(self.seconds as u64, self.nseconds)) } else { None }
    }

    /// As near as it can be said: what is past 2106 is the last second there is.
    pub fn from_epoch(since: Duration) -> Self {
        match u32::try_from(since.as_secs()) {
            Ok(seconds) => Self { seconds, nseconds: since.subsec_nanos() },
            Err(_) => Self { seconds: u32::MAX, nseconds: 999_999_999 },
        }
    }
}

codec_struct! {
    /// specdata3: major and minor number of a device.
    #[derive(Clone, Copy, Debug, Eq, PartialEq)]
    pub struct Device {
        pub major: u32,
        pub minor: u32,
    }
}

impl Device {
    /// What an object has that is no device.
    pub const NONE: Self = Self { major: 0, minor: 0 };
}

codec_struct! {
    /// fattr3. Where it may be missing (post_op_attr) it is an `Option`.
    #[derive(Clone, Copy, Debug, Eq, PartialEq)]
    pub struct Attributes {
        pub kind: FileType,
        /// Permission bits, the lower twelve.
        pub mode: u32,
        pub nlink: u32,
        pub uid: u32,
        pub gid: u32,
        /// Octets.
        pub size: u64,
        /// Octets that it takes.
        pub used: u64,
        pub rdev: Device,
        pub fsid: u64,
        pub fileid: FileId,
        pub atime: Time,
        pub mtime: Time,
        pub ctime: Time,
    }
}

codec_struct! {
    /// wcc_attr: attributes before an operation, as far as they tell whether another came between.
    #[derive(Clone, Copy, Debug, Eq, PartialEq)]
    pub struct WccAttributes {
        pub size: u64,
        pub mtime: Time,
        pub ctime: Time,
    }
}

codec_struct! {
    /// wcc_data: weak cache consistency. Both are of one moment each, right before and right after, or missing.
    #[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
    pub struct WccData {
        pub before: Option<WccAttributes>,
        pub after: Option<Attributes>,
    }
}

impl From<&Attributes> for WccAttributes {
    fn from(&Attributes { size, mtime, ctime, .. }: &Attributes) -> Self {
        Self { size, mtime, ctime }
    }
}

/// set_atime and set_mtime.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum SetTime {
    #[default]
    DontChange,
    ServerTime,
    ClientTime(Time),
}

impl Codec for SetTime {
    const BYTES_MIN: usize = 4;

    fn read(reader: &mut Reader<'_>) -> Result<Self, XdrError> {
        Ok(match reader.value("a way to set a time", |how| (how <= 2).then_some(how))? {
            0 => Self::DontChange,
            1 => Self::ServerTime,
            _ => Self::ClientTime(Time::read(reader)?),
        })
    }

    fn write(&self, writer: &mut Writer) {
        match self {
            Self::DontChange => writer.u32(0),
            Self::ServerTime => writer.u32(1),
            Self::ClientTime(time) => {
                writer.u32(2);
                time.write(writer);
            }
        }
    }
}

codec_struct! {
    /// sattr3: what is to be set, and nothing else.
    #[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
    pub struct SetAttributes {
        pub mode: Option<u32>,
        pub uid: Option<u32>,
        pub gid: Option<u32>,
        pub size: Option<u64>,
        pub atime: SetTime,
        pub mtime: SetTime,
    }
}

/// nfs_fh3: what the server calls an object. Of 0 to 64 octets, held here so that it may outlive the message; which of them
/// is a handle at all only the server's file system can say.
#[derive(Clone, Copy, Eq, Hash, PartialEq)]
pub struct FileHandle {
    len: u8,
    /// Zero past `len`, so that equality is that of the octets.
    octets: [u8; FILE_HANDLE_BYTES_MAX],
}

impl FileHandle {
    /// `None` if there are more than 64.
    pub fn new(handle: &[u8]) -> Option<Self> {
        let mut octets = [0; FILE_HANDLE_BYTES_MAX];
        octets.get_mut(..handle.len())?.copy_from_slice(handle);
        Some(Self { len: handle.len() as u8, octets })
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.octets[..usize::from(self.len)]
    }
}

impl fmt::Debug for FileHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FileHandle(")?;
        for octet in self.as_bytes() {
            write!(f, "{octet:02x}")?;
        }
        f.write_str(")")
    }
}

impl Codec for FileHandle {
    const BYTES_MIN: usize = 4;

    fn read(reader: &mut Reader<'_>) -> Result<Self, XdrError> {
        let octets = reader.opaque(FILE_HANDLE_BYTES_MAX)?;
        Ok(Self::new(octets).expect("as many as were read"))
    }

    fn write(&self, writer: &mut Writer) {
        writer.opaque(self.as_bytes());
    }
}

/// filename3 as it came: any octets. What is wrong with it is no matter of the message, but has an error of its own.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Name<'a>(pub &'a [u8]);

impl<'a> Name<'a> {
    pub(super) fn read(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        reader.opaque(NAME_BYTES_READ_MAX).map(Self)
    }

    /// The octets, if they can name something in a directory, or are `.` or `..`.
    ///
    /// # Errors
    /// [`NfsError::Acces`] for none and for `/` and NUL, [`NfsError::NameTooLong`] for more than 255 (§3.2).
    pub fn component(self) -> Result<&'a [u8], NfsError> {
        match self.0 {
            name if name.len() > NAME_BYTES_MAX => Err(NfsError::NameTooLong),
            name if name.is_empty() || name.contains(&b'/') || name.contains(&0) => Err(NfsError::Acces),
            name => Ok(name),
        }
    }
}

/// diropargs3: a name in a directory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Place<'a> {
    pub dir: FileHandle,
    pub name: Name<'a>,
}

impl<'a> Place<'a> {
    pub(super) fn read(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        Ok(Self { dir: FileHandle::read(reader)?, name: Name::read(reader)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::codec::Wanted;

    #[test]
    fn a_handle_has_64_octets_at_most_and_zeros_behind_it_are_not_of_it() {
        for (len, good) in [(0, true), (1, true), (63, true), (64, true), (65, false)] {
            let octets = vec![7; len];
            let mut writer = Writer::new();
            writer.opaque(&octets);
            let encoded = writer.finish();
            let read = FileHandle::read(&mut Reader::new(&encoded));
            match FileHandle::new(&octets) {
                Some(handle) => {
                    assert_eq!((read, handle.as_bytes()), (Ok(handle), &octets[..]));
                    let mut writer = Writer::new();
                    handle.write(&mut writer);
                    assert_eq!(writer.finish(), encoded);
                }
                None => assert_eq!(read.unwrap_err().wanted, Wanted::AtMost { limit: 64, found: 65 }),
            }
            assert_eq!(FileHandle::new(&octets).is_some(), good, "{len} octets");
        }
        assert_ne!(FileHandle::new(&[1]), FileHandle::new(&[1, 0]));
    }

    #[test]
    fn a_name_is_refused_with_the_error_that_the_rfc_gives_for_it() {
        let long = [b'n'; NAME_BYTES_MAX + 1];
        assert_eq!(Name(&long).component(), Err(NfsError::NameTooLong));
        assert_eq!(Name(&long[1..]).component(), Ok(&long[1..]));
        for refused in [&b""[..], b"/", b"a/b", b"a\0"] {
            assert_eq!(Name(refused).component(), Err(NfsError::Acces), "{refused:?}");
        }
        for good in [&b"."[..], b"..", b"a", b"\xff\n"] {
            assert_eq!(Name(good).component(), Ok(good));
        }
    }

    #[test]
    fn names_of_more_than_a_path_may_have_are_not_read() {
        for (len, good) in [(NAME_BYTES_READ_MAX, true), (NAME_BYTES_READ_MAX + 1, false)] {
            let mut writer = Writer::new();
            writer.opaque(&vec![b'n'; len]);
            assert_eq!(Name::read(&mut Reader::new(&writer.finish())).is_ok(), good, "{len} octets");
        }
    }

    #[test]
    fn times_are_durations_if_their_nanoseconds_are_less_than_a_second() {
        let time = Time { seconds: 5, nseconds: 999_999_999 };
        let since = Duration::new(5, 999_999_999);
        assert_eq!((time.since_epoch(), Time::from_epoch(since)), (Some(since), time));
        assert_eq!(Time { seconds: 5, nseconds: 1_000_000_000 }.since_epoch(), None);
        let last = Time { seconds: u32::MAX, nseconds: 999_999_999 };
        assert_eq!(Time::from_epoch(Duration::new(1 << 32, 0)), last);
        assert_eq!(Time::from_epoch(Duration::new(u32::MAX.into(), 1)).nseconds, 1);
    }

    #[test]
    fn a_time_is_set_in_one_of_three_ways() {
        for (words, how) in [
            (&[0][..], SetTime::DontChange),
            (&[1], SetTime::ServerTime),
            (&[2, 8, 9], SetTime::ClientTime(Time { seconds: 8, nseconds: 9 })),
        ] {
            let octets: Vec<u8> = words.iter().flat_map(|word: &u32| word.to_be_bytes()).collect();
            let mut reader = Reader::new(&octets);
            assert_eq!(SetTime::read(&mut reader), Ok(how));
            assert_eq!(reader.left(), 0);
            let mut writer = Writer::new();
            how.write(&mut writer);
            assert_eq!(writer.finish(), octets);
        }
        assert!(SetTime::read(&mut Reader::new(&[0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0])).is_err());
    }
}
