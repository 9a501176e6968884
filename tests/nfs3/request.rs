//! Arguments of every procedure.

use super::*;
use bulkhead::programs::rpc::Data;
use nfs3_types::xdr_codec::Void;

/// Arguments as the oracle writes them, and the request that they are. The data, if there is any, is their end.
pub fn request(number: u32, parts: &Parts) -> (Vec<u8>, Request<'_>) {
    let (object, place, set) = (parts.handle(0), parts.place(0), parts.set);
    let [count, maxcount, ..] = parts.words;
    let [offset, cookie, ..] = parts.hypers;
    let o_object = o_handle(object);
    let data = |octets: &[u8]| {
        // Where an opaque is that ends the message, and roundup behind it.
        let end = octets.len() - (parts.data.len().next_multiple_of(4) - parts.data.len()) + CALL_HEADER_BYTES;
        Data::Inline(end - parts.data.len()..end)
    };
    match number {
        procedure::NULL => (packed(&Void), Request::Null),
        procedure::GETATTR => (packed(&oracle::GETATTR3args { object: o_object }), Request::GetAttr { object }),
        procedure::SETATTR => {
            let (new_attributes, guard) = (o_set(set), option(parts.time, o_time));
            let octets = packed(&oracle::SETATTR3args { object: o_object, new_attributes, guard });
            (octets, Request::SetAttr(SetAttr { object, new_attributes: set, guard: parts.time }))
        }
        procedure::LOOKUP => (packed(&oracle::LOOKUP3args { what: o_place(place) }), Request::Lookup(place)),
        procedure::ACCESS => (
            packed(&oracle::ACCESS3args { object: o_object, access: count }),
            Request::Access { object, access: count },
        ),
        procedure::READLINK => {
            (packed(&oracle::READLINK3args { symlink: o_object }), Request::ReadLink { symlink: object })
        }
        procedure::READ => (
            packed(&oracle::READ3args { file: o_object, offset, count }),
            Request::Read(Read { file: object, offset, count }),
        ),
        procedure::WRITE => {
            let octets = packed(&oracle::WRITE3args {
                file: o_object,
                offset,
                count: parts.data.len() as u32,
                stable: o_stable(parts.stable),
                data: Opaque::borrowed(&parts.data),
            });
            let data = data(&octets);
            (octets, Request::Write(Write { file: object, offset, stable: parts.stable, data }))
        }
        procedure::CREATE => {
            let (how, o_how) = match count % 3 {
                0 => (CreateHow::Unchecked(set), oracle::createhow3::UNCHECKED(o_set(set))),
                1 => (CreateHow::Guarded(set), oracle::createhow3::GUARDED(o_set(set))),
                _ => (
                    CreateHow::Exclusive(CreateVerifier(parts.octets)),
                    oracle::createhow3::EXCLUSIVE(oracle::createverf3(parts.octets)),
                ),
            };
            let octets = packed(&oracle::CREATE3args { where_: o_place(place), how: o_how });
            (octets, Request::Create(Create { place, how }))
        }
        procedure::MKDIR => (
            packed(&oracle::MKDIR3args { where_: o_place(place), attributes: o_set(set) }),
            Request::MkDir(MakeDirectory { place, attributes: set }),
        ),
        procedure::SYMLINK => {
            let symlink =
                oracle::symlinkdata3 { symlink_attributes: o_set(set), symlink_data: parts.data.as_slice().into() };
            let octets = packed(&oracle::SYMLINK3args { where_: o_place(place), symlink });
            let path = data(&octets);
            (octets, Request::SymLink(MakeSymbolicLink { place, attributes: set, path }))
        }
        procedure::MKNOD => {
            let device = Device { major: count, minor: maxcount };
            let o_data = || oracle::devicedata3 { dev_attributes: o_set(set), spec: o_device(device) };
            let (what, o_what) = match parts.kind {
                FileType::Character => (Node::Character(set, device), oracle::mknoddata3::NF3CHR(o_data())),
                FileType::Block => (Node::Block(set, device), oracle::mknoddata3::NF3BLK(o_data())),
                FileType::Socket => (Node::Socket(set), oracle::mknoddata3::NF3SOCK(o_set(set))),
                FileType::Fifo => (Node::Fifo(set), oracle::mknoddata3::NF3FIFO(o_set(set))),
                other => {
                    // The oracle does not write these: they are a type and nothing else.
                    let octets = [packed(&o_place(place)), packed(&o_kind(other))].concat();
                    return (octets, Request::MkNod(MakeNode { place, what: Node::Other(other) }));
                }
            };
            let octets = packed(&oracle::MKNOD3args { where_: o_place(place), what: o_what });
            (octets, Request::MkNod(MakeNode { place, what }))
        }
        procedure::REMOVE => (packed(&oracle::REMOVE3args { object: o_place(place) }), Request::Remove(place)),
        procedure::RMDIR => (packed(&oracle::RMDIR3args { object: o_place(place) }), Request::RmDir(place)),
        procedure::RENAME => {
            let (from, to) = (place, parts.place(1));
            let octets = packed(&oracle::RENAME3args { from: o_place(from), to: o_place(to) });
            (octets, Request::Rename(Rename { from, to }))
        }
        procedure::LINK => {
            let link = parts.place(1);
            let octets = packed(&oracle::LINK3args { file: o_object, link: o_place(link) });
            (octets, Request::Link(LinkTo { file: object, link }))
        }
        procedure::READDIR => {
            let cookieverf = oracle::cookieverf3(parts.octets);
            let octets = packed(&oracle::READDIR3args { dir: o_object, cookie, cookieverf, count });
            let (cookie, verifier) = (Cookie(cookie), CookieVerifier(parts.octets));
            (octets, Request::ReadDir(ReadDirectory { dir: object, cookie, verifier, count }))
        }
        procedure::READDIRPLUS => {
            let (cookieverf, dircount) = (oracle::cookieverf3(parts.octets), count);
            let octets = packed(&oracle::READDIRPLUS3args { dir: o_object, cookie, cookieverf, dircount, maxcount });
            let (cookie, verifier) = (Cookie(cookie), CookieVerifier(parts.octets));
            (octets, Request::ReadDirPlus(ReadDirectoryPlus { dir: object, cookie, verifier, dircount, maxcount }))
        }
        procedure::FSSTAT => (packed(&oracle::FSSTAT3args { fsroot: o_object }), Request::FsStat { root: object }),
        procedure::FSINFO => (packed(&oracle::FSINFO3args { fsroot: o_object }), Request::FsInfo { root: object }),
        procedure::PATHCONF => (packed(&oracle::PATHCONF3args { object: o_object }), Request::PathConf { object }),
        procedure::COMMIT => (
            packed(&oracle::COMMIT3args { file: o_object, offset, count }),
            Request::Commit(Commit { file: object, offset, count }),
        ),
        other => panic!("procedure {other}"),
    }
}
