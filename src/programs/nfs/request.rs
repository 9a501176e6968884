//! Arguments of every procedure (RFC 1813 §3.3).

use super::reply::{self, Failure, Outcome, Reply};
use super::types::{
    Cookie, CookieVerifier, CreateVerifier, Device, FileHandle, FileType, NfsError, Place, SetAttributes, Stable, Time,
};
use super::{
    DIRECTORY_BYTES_MAX, PROGRAM, PROGRAM_NUMBER, READLINK_PATH, SYMLINK_PATH, TRANSFER_BYTES_MAX, VERSION, WRITE_DATA,
    procedure,
};
use crate::programs::rpc::{ArgumentFault, ArgumentReader, Call, Data, Procedure, ReplyBound};
use crate::wire::codec::{Codec, Reader, Wanted, XdrError};

/// Arguments of SETATTR.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct SetAttr {
    pub object: FileHandle,
    pub new_attributes: SetAttributes,
    /// The ctime that the object must have.
    pub guard: Option<Time>,
}

/// Arguments of READ.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Read {
    pub file: FileHandle,
    /// First octet.
    pub offset: u64,
    /// Octets at most. More than [`TRANSFER_BYTES_MAX`] may be asked for, and so many are given.
    pub count: u32,
}

/// Arguments of WRITE. Its count is the length of `data`: another is refused. So is more than [`TRANSFER_BYTES_MAX`], which
/// FSINFO says: a server may, and need not, write a part (RFC 1813 §3.3.7).
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Write {
    pub file: FileHandle,
    /// Of the first octet in the file. The last may be past 2^64.
    pub offset: u64,
    pub stable: Stable,
    /// At most [`TRANSFER_BYTES_MAX`] octets.
    pub data: Data,
}

/// createhow3.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum CreateHow {
    Unchecked(SetAttributes),
    Guarded(SetAttributes),
    Exclusive(CreateVerifier),
}

/// Arguments of CREATE.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Create<'a> {
    pub place: Place<'a>,
    pub how: CreateHow,
}

/// Arguments of MKDIR.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct MakeDirectory<'a> {
    pub place: Place<'a>,
    pub attributes: SetAttributes,
}

/// Arguments of SYMLINK.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct MakeSymbolicLink<'a> {
    pub place: Place<'a>,
    pub attributes: SetAttributes,
    pub path: Data,
}

/// mknoddata3.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Node {
    Character(SetAttributes, Device),
    Block(SetAttributes, Device),
    Socket(SetAttributes),
    Fifo(SetAttributes),
    /// What MKNOD does not make: [`NfsError::BadType`].
    Other(FileType),
}

/// Arguments of MKNOD.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct MakeNode<'a> {
    pub place: Place<'a>,
    pub what: Node,
}

/// Arguments of RENAME.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Rename<'a> {
    pub from: Place<'a>,
    pub to: Place<'a>,
}

/// Arguments of LINK.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct LinkTo<'a> {
    pub file: FileHandle,
    pub link: Place<'a>,
}

/// Arguments of READDIR.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ReadDirectory {
    pub dir: FileHandle,
    pub cookie: Cookie,
    pub verifier: CookieVerifier,
    /// Octets of the results behind their status, at most.
    pub count: u32,
}

/// Arguments of READDIRPLUS.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ReadDirectoryPlus {
    pub dir: FileHandle,
    pub cookie: Cookie,
    pub verifier: CookieVerifier,
    /// Octets of the entries but for attributes and handles, at most.
    pub dircount: u32,
    /// Octets of the results behind their status, at most.
    pub maxcount: u32,
}

/// Arguments of COMMIT.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Commit {
    pub file: FileHandle,
    pub offset: u64,
    /// Octets, 0 for all to the end of the file.
    pub count: u32,
}

/// A call of the program.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Request<'a> {
    Null,
    GetAttr {
        object: FileHandle,
    },
    SetAttr(SetAttr),
    Lookup(Place<'a>),
    Access {
        object: FileHandle,
        /// Bits of [`access`](super::access), and perhaps others.
        access: u32,
    },
    ReadLink {
        symlink: FileHandle,
    },
    Read(Read),
    Write(Write),
    Create(Create<'a>),
    MkDir(MakeDirectory<'a>),
    SymLink(MakeSymbolicLink<'a>),
    MkNod(MakeNode<'a>),
    Remove(Place<'a>),
    RmDir(Place<'a>),
    Rename(Rename<'a>),
    Link(LinkTo<'a>),
    ReadDir(ReadDirectory),
    ReadDirPlus(ReadDirectoryPlus),
    FsStat {
        root: FileHandle,
    },
    FsInfo {
        root: FileHandle,
    },
    PathConf {
        object: FileHandle,
    },
    Commit(Commit),
}

impl<'a> Request<'a> {
    /// Reads the arguments of `call`.
    ///
    /// # Errors
    /// [`ArgumentFault`].
    ///
    /// # Panics
    /// If `call` is to another program.
    pub fn parse(call: Call<'a>) -> Result<Self, ArgumentFault> {
        assert_eq!((call.program.number, call.program.version), (PROGRAM_NUMBER, VERSION));
        call.arguments.read_all(|arguments| Self::read(call.procedure.number, arguments))
    }

    fn read(number: u32, arguments: &mut ArgumentReader<'a>) -> Result<Self, ArgumentFault> {
        let words = arguments.words();
        Ok(match number {
            procedure::NULL => Self::Null,
            procedure::GETATTR => Self::GetAttr { object: Codec::read(words)? },
            procedure::SETATTR => Self::SetAttr(SetAttr {
                object: Codec::read(words)?,
                new_attributes: Codec::read(words)?,
                guard: Codec::read(words)?,
            }),
            procedure::LOOKUP => Self::Lookup(Place::read(words)?),
            procedure::ACCESS => Self::Access { object: Codec::read(words)?, access: words.u32()? },
            procedure::READLINK => Self::ReadLink { symlink: Codec::read(words)? },
            procedure::READ => {
                Self::Read(Read { file: Codec::read(words)?, offset: words.u64()?, count: words.u32()? })
            }
            procedure::WRITE => {
                let WriteHead { file, offset, count, stable } = WriteHead::read(words)?;
                let data = arguments.data(&WRITE_DATA)?;
                if data.len() != count.value {
                    let wanted = Wanted::Value { what: "the length of the data as its count", found: count.value };
                    return Err(XdrError { offset: count.offset, wanted }.into());
                }
                Self::Write(Write { file, offset, stable, data })
            }
            procedure::CREATE => Self::Create(Create { place: Place::read(words)?, how: read_how(words)? }),
            procedure::MKDIR => {
                Self::MkDir(MakeDirectory { place: Place::read(words)?, attributes: Codec::read(words)? })
            }
            procedure::SYMLINK => Self::SymLink(MakeSymbolicLink {
                place: Place::read(words)?,
                attributes: Codec::read(words)?,
                path: arguments.data(&SYMLINK_PATH)?,
            }),
            procedure::MKNOD => Self::MkNod(MakeNode { place: Place::read(words)?, what: read_node(words)? }),
            procedure::REMOVE => Self::Remove(Place::read(words)?),
            procedure::RMDIR => Self::RmDir(Place::read(words)?),
            procedure::RENAME => Self::Rename(Rename { from: Place::read(words)?, to: Place::read(words)? }),
            procedure::LINK => Self::Link(LinkTo { file: Codec::read(words)?, link: Place::read(words)? }),
            procedure::READDIR => Self::ReadDir(ReadDirectory {
                dir: Codec::read(words)?,
                cookie: Codec::read(words)?,
                verifier: Codec::read(words)?,
                count: words.u32()?,
            }),
            procedure::READDIRPLUS => Self::ReadDirPlus(ReadDirectoryPlus {
                dir: Codec::read(words)?,
                cookie: Codec::read(words)?,
                verifier: Codec::read(words)?,
                dircount: words.u32()?,
                maxcount: words.u32()?,
            }),
            procedure::FSSTAT => Self::FsStat { root: Codec::read(words)? },
            procedure::FSINFO => Self::FsInfo { root: Codec::read(words)? },
            procedure::PATHCONF => Self::PathConf { object: Codec::read(words)? },
            procedure::COMMIT => {
                Self::Commit(Commit { file: Codec::read(words)?, offset: words.u64()?, count: words.u32()? })
            }
            other => unreachable!("procedure {other} is not in the table"),
        })
    }

    /// The procedure it calls, with what of it may be reduced.
    pub fn procedure(&self) -> &'static Procedure {
        let number = match self {
            Self::Null => procedure::NULL,
            Self::GetAttr { .. } => procedure::GETATTR,
            Self::SetAttr(_) => procedure::SETATTR,
            Self::Lookup(_) => procedure::LOOKUP,
            Self::Access { .. } => procedure::ACCESS,
            Self::ReadLink { .. } => procedure::READLINK,
            Self::Read(_) => procedure::READ,
            Self::Write(_) => procedure::WRITE,
            Self::Create(_) => procedure::CREATE,
            Self::MkDir(_) => procedure::MKDIR,
            Self::SymLink(_) => procedure::SYMLINK,
            Self::MkNod(_) => procedure::MKNOD,
            Self::Remove(_) => procedure::REMOVE,
            Self::RmDir(_) => procedure::RMDIR,
            Self::Rename(_) => procedure::RENAME,
            Self::Link(_) => procedure::LINK,
            Self::ReadDir(_) => procedure::READDIR,
            Self::ReadDirPlus(_) => procedure::READDIRPLUS,
            Self::FsStat { .. } => procedure::FSSTAT,
            Self::FsInfo { .. } => procedure::FSINFO,
            Self::PathConf { .. } => procedure::PATHCONF,
            Self::Commit(_) => procedure::COMMIT,
        };
        // The table has every number, in order: a test sees to that.
        &PROGRAM.procedures[number as usize]
    }

    /// It would show if it were done twice: when it comes again it is answered as the first time and not executed. A WRITE
    /// is among them, for another may have come between.
    pub fn has_lasting_effect(&self) -> bool {
        match self {
            Self::SetAttr(_) | Self::Write(_) | Self::Create(_) | Self::MkDir(_) | Self::SymLink(_) => true,
            Self::MkNod(_) | Self::Remove(_) | Self::RmDir(_) | Self::Rename(_) | Self::Link(_) => true,
            Self::Null | Self::GetAttr { .. } | Self::Lookup(_) | Self::Access { .. } | Self::ReadLink { .. } => false,
            Self::Read(_) | Self::ReadDir(_) | Self::ReadDirPlus(_) | Self::Commit(_) => false,
            Self::FsStat { .. } | Self::FsInfo { .. } | Self::PathConf { .. } => false,
        }
    }

    /// The largest reply that there can be to it, from a server whose verifier has no body.
    pub fn reply_bound(&self) -> ReplyBound {
        let directory = |count: u32| reply::listing_bytes_max(count.min(DIRECTORY_BYTES_MAX));
        ReplyBound::new(match self {
            Self::ReadDir(read) => directory(read.count),
            Self::ReadDirPlus(read) => directory(read.maxcount),
            other => reply::results_bytes_max(other.procedure().number),
        })
        .with_item(match self {
            Self::Read(read) => Some(read.count.min(TRANSFER_BYTES_MAX)),
            Self::ReadLink { .. } => Some(READLINK_PATH.bytes_max),
            _ => None,
        })
    }

    /// The reply that says this error and nothing else. NULL has no errors.
    pub fn refuse(&self, error: NfsError) -> Reply {
        fn no<T, F: Default>(error: NfsError) -> Outcome<T, F> {
            Err(Failure { error, attributes: F::default() })
        }
        match self {
            Self::Null => Reply::Null,
            Self::GetAttr { .. } => Reply::GetAttr(no(error)),
            Self::SetAttr(_) => Reply::SetAttr(no(error)),
            Self::Lookup(_) => Reply::Lookup(no(error)),
            Self::Access { .. } => Reply::Access(no(error)),
            Self::ReadLink { .. } => Reply::ReadLink(no(error)),
            Self::Read(_) => Reply::Read(no(error)),
            Self::Write(_) => Reply::Write(no(error)),
            Self::Create(_) => Reply::Create(no(error)),
            Self::MkDir(_) => Reply::MkDir(no(error)),
            Self::SymLink(_) => Reply::SymLink(no(error)),
            Self::MkNod(_) => Reply::MkNod(no(error)),
            Self::Remove(_) => Reply::Remove(no(error)),
            Self::RmDir(_) => Reply::RmDir(no(error)),
            Self::Rename(_) => Reply::Rename(no(error)),
            Self::Link(_) => Reply::Link(no(error)),
            Self::ReadDir(_) => Reply::ReadDir(no(error)),
            Self::ReadDirPlus(_) => Reply::ReadDirPlus(no(error)),
            Self::FsStat { .. } => Reply::FsStat(no(error)),
            Self::FsInfo { .. } => Reply::FsInfo(no(error)),
            Self::PathConf { .. } => Reply::PathConf(no(error)),
            Self::Commit(_) => Reply::Commit(no(error)),
        }
    }
}

/// A word, and where it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct WordAt {
    pub offset: usize,
    pub value: u32,
}

/// What is in front of the data of a WRITE.
#[derive(Clone, Copy, Debug)]
pub(super) struct WriteHead {
    pub file: FileHandle,
    pub offset: u64,
    pub count: WordAt,
    pub stable: Stable,
}

impl WriteHead {
    pub(super) fn read(words: &mut Reader<'_>) -> Result<Self, XdrError> {
        let (file, offset) = (Codec::read(words)?, words.u64()?);
        let count = WordAt { offset: words.offset(), value: words.u32()? };
        Ok(Self { file, offset, count, stable: Codec::read(words)? })
    }
}

fn read_how(words: &mut Reader<'_>) -> Result<CreateHow, XdrError> {
    Ok(match words.value("a way to create", |how| (how <= 2).then_some(how))? {
        0 => CreateHow::Unchecked(Codec::read(words)?),
        1 => CreateHow::Guarded(Codec::read(words)?),
        _ => CreateHow::Exclusive(Codec::read(words)?),
    })
}

fn read_node(words: &mut Reader<'_>) -> Result<Node, XdrError> {
    Ok(match FileType::read(words)? {
        FileType::Character => Node::Character(Codec::read(words)?, Codec::read(words)?),
        FileType::Block => Node::Block(Codec::read(words)?, Codec::read(words)?),
        FileType::Socket => Node::Socket(Codec::read(words)?),
        FileType::Fifo => Node::Fifo(Codec::read(words)?),
        other @ (FileType::Regular | FileType::Directory | FileType::SymbolicLink) => Node::Other(other),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::programs::nfs::{CALL_BYTES_MAX, NAME_BYTES_READ_MAX};
    use crate::programs::rpc::{Arguments, Reduced, accept};
    use crate::wire::codec::Writer;
    use crate::wire::onc_rpc::{CallHeader, OpaqueAuth, Part, Xid};

    const HANDLE: &[u8] = b"handle";

    /// A call message: header of 40 octets, then what `arguments` writes.
    fn call(procedure: u32, arguments: impl FnOnce(&mut Writer)) -> Vec<u8> {
        let (credential, verifier) = (OpaqueAuth::NONE, OpaqueAuth::NONE);
        let mut writer = Writer::new();
        CallHeader { xid: Xid(1), program: PROGRAM_NUMBER, version: VERSION, procedure, credential, verifier }
            .write(&mut writer);
        assert_eq!(writer.len(), 40);
        arguments(&mut writer);
        writer.finish()
    }

    fn parse<'a>(stream: &'a [u8], chunks: &'a [Reduced]) -> Result<Request<'a>, ArgumentFault> {
        Request::parse(accept(&[&PROGRAM], Arguments { stream, chunks }).unwrap())
    }

    fn write_call(count: u32, data: impl FnOnce(&mut Writer)) -> Vec<u8> {
        call(procedure::WRITE, |words| {
            words.opaque(HANDLE);
            words.u64(1 << 40);
            words.u32(count);
            words.u32(1);
            data(words);
        })
    }

    #[test]
    fn the_data_of_a_write_stays_where_it_is() {
        let file = FileHandle::new(HANDLE).unwrap();
        let expect = |data| Request::Write(Write { file, offset: 1 << 40, stable: Stable::DataSync, data });
        // 40 of header, 12 of handle, 8 of offset, count, stability, length.
        let inline = write_call(5, |words| words.opaque(b"hello"));
        assert_eq!(parse(&inline, &[]), Ok(expect(Data::Inline(72..77))));
        let reduced = write_call(5, |words| words.u32(5));
        for len in [5, 8] {
            let chunks = [Reduced { position: 72, len }];
            assert_eq!(parse(&reduced, &chunks), Ok(expect(Data::Chunk { index: 0, len: 5 })));
        }
    }

    #[test]
    fn a_write_says_as_many_octets_as_it_has() {
        for count in [0, 4, 6, u32::MAX] {
            let fault = parse(&write_call(count, |words| words.opaque(b"hello")), &[]).unwrap_err();
            assert!(matches!(fault, ArgumentFault::Xdr(XdrError { offset: 60, .. })), "{count}: {fault}");
            let reduced = write_call(count, |words| words.u32(5));
            let fault = parse(&reduced, &[Reduced { position: 72, len: 5 }]).unwrap_err();
            assert!(!fault.is_chunk_error(), "{count}: {fault}");
        }
    }

    #[test]
    fn more_data_than_a_write_may_have_is_refused_before_it_is_looked_for() {
        let over = TRANSFER_BYTES_MAX + 1;
        let stream = write_call(over, |words| words.u32(over));
        assert!(parse(&stream, &[Reduced { position: 72, len: over.into() }]).unwrap_err().is_chunk_error());
        assert!(matches!(parse(&stream, &[]), Err(ArgumentFault::Xdr(_))));
    }

    #[test]
    fn nothing_else_of_a_call_may_be_reduced() {
        let symlink = call(procedure::SYMLINK, |words| {
            words.opaque(HANDLE);
            words.opaque(b"name");
            SetAttributes::default().write(words);
            words.opaque(b"path");
        });
        let path = 40 + 12 + 8 + 24 + 4;
        let reduced = [&symlink[..path], &symlink[path + 4..]].concat();
        let chunk = |position: usize| [Reduced { position: position as u64, len: 4 }];
        assert!(matches!(
            parse(&reduced, &chunk(path)),
            Ok(Request::SymLink(MakeSymbolicLink { path: Data::Chunk { index: 0, len: 4 }, .. }))
        ));
        for position in (40..symlink.len()).step_by(4).filter(|position| *position != path) {
            assert!(parse(&symlink, &chunk(position)).unwrap_err().is_chunk_error(), "at {position}");
        }
        let lookup = call(procedure::LOOKUP, |words| {
            words.opaque(HANDLE);
            words.opaque(b"name");
        });
        for position in (40..=lookup.len()).step_by(4) {
            assert!(parse(&lookup, &chunk(position)).unwrap_err().is_chunk_error(), "at {position}");
        }
    }

    #[test]
    fn unions_have_the_arms_that_they_have() {
        let create = |how: u32| {
            call(procedure::CREATE, |words| {
                words.opaque(HANDLE);
                words.opaque(b"name");
                words.u32(how);
                words.u64(7);
            })
        };
        assert!(matches!(
            parse(&create(2), &[]),
            Ok(Request::Create(Create { how: CreateHow::Exclusive(CreateVerifier([0, 0, 0, 0, 0, 0, 0, 7])), .. }))
        ));
        assert!(parse(&create(3), &[]).is_err());
        let node = |kind: u32| {
            call(procedure::MKNOD, |words| {
                words.opaque(HANDLE);
                words.opaque(b"name");
                words.u32(kind);
            })
        };
        for kind in 0..9 {
            let stream = node(kind);
            let found = parse(&stream, &[]);
            match FileType::from_number(kind) {
                Some(kind @ (FileType::Regular | FileType::Directory | FileType::SymbolicLink)) => {
                    assert!(
                        matches!(found, Ok(Request::MkNod(MakeNode { what: Node::Other(found), .. })) if found == kind)
                    );
                }
                // Their attributes are not there.
                _ => assert!(found.is_err(), "type {kind}"),
            }
        }
    }

    #[test]
    fn the_longest_call_but_for_data_is_within_its_bound() {
        let sys = [b'c'; 400];
        let auth = OpaqueAuth { flavor: 0, body: &sys };
        let (handle, name) = ([1; 64], [b'n'; NAME_BYTES_READ_MAX]);
        let header = |procedure| {
            let (program, version) = (PROGRAM_NUMBER, VERSION);
            let mut writer = Writer::new();
            CallHeader { xid: Xid(1), program, version, procedure, credential: auth, verifier: auth }
                .write(&mut writer);
            writer
        };
        let mut rename = header(procedure::RENAME);
        for _ in 0..2 {
            rename.opaque(&handle);
            rename.opaque(&name);
        }
        let rename = rename.finish();
        assert!(matches!(parse(&rename, &[]), Ok(Request::Rename(_))));
        assert_eq!(rename.len(), CALL_BYTES_MAX);
        let mut symlink = header(procedure::SYMLINK);
        symlink.opaque(&handle);
        symlink.opaque(&name);
        let time = super::super::SetTime::ClientTime(Time { seconds: 0, nseconds: 0 });
        let (word, size) = (Some(0), Some(0));
        SetAttributes { mode: word, uid: word, gid: word, size, atime: time, mtime: time }.write(&mut symlink);
        symlink.opaque(&name);
        let symlink = symlink.finish();
        assert!(matches!(parse(&symlink, &[]), Ok(Request::SymLink(_))));
        assert!(symlink.len() <= CALL_BYTES_MAX, "{} octets", symlink.len());
    }

    #[test]
    fn what_changes_something_is_done_once() {
        let lasting: Vec<_> = PROGRAM
            .procedures
            .iter()
            .filter(|procedure| plain(procedure.number, |request| request.has_lasting_effect()))
            .map(|procedure| procedure.name)
            .collect();
        let all = ["SETATTR", "WRITE", "CREATE", "MKDIR", "SYMLINK", "MKNOD", "REMOVE", "RMDIR", "RENAME", "LINK"];
        assert_eq!(lasting, all);
    }

    #[test]
    fn a_refusal_is_an_error_of_the_same_procedure_and_within_the_bound() {
        for procedure in PROGRAM.procedures {
            plain(procedure.number, |request| {
                assert_eq!(request.procedure(), procedure);
                let reply = request.refuse(NfsError::Jukebox);
                assert_eq!(reply.procedure(), procedure);
                let payload = reply.encode(Xid(3));
                let [Part::Bytes(bytes)] = payload.parts() else { panic!("{payload:?}") };
                assert!(bytes.len() as u64 <= request.reply_bound().reduced_bytes, "{}", procedure.name);
                if procedure.number != procedure::NULL {
                    assert_eq!(bytes[24..28], 10_008_u32.to_be_bytes());
                }
            });
        }
    }

    /// What `look` finds of a request of that procedure, made of zeros: handles and names of no octets.
    fn plain<T>(number: u32, look: impl FnOnce(Request<'_>) -> T) -> T {
        let mut stream = call(number, |_| {});
        loop {
            match accept(&[&PROGRAM], Arguments { stream: &stream, chunks: &[] }).map(Request::parse).unwrap() {
                Ok(request) => return look(request),
                Err(ArgumentFault::Xdr(XdrError { wanted: Wanted::Octets { .. }, .. })) => stream.extend([0; 4]),
                // There is no type 0.
                Err(_) => *stream.last_mut().unwrap() = 1,
            }
        }
    }
}
