//! Results of every procedure.

use super::*;
use nfs3_types::xdr_codec::Void;

fn outcome<T, F, U: Pack + Unpack, G: Pack + Unpack>(
    parts: &Parts,
    is_done: bool,
    done: (T, U),
    failed: (F, G),
) -> (Outcome<T, F>, Vec<u8>) {
    let (ours, theirs) = if is_done {
        (Ok(done.0), oracle::Nfs3Result::Ok(done.1))
    } else {
        let failure = Failure { error: parts.error, attributes: failed.0 };
        (Err(failure), oracle::Nfs3Result::Err((o_error(parts.error), failed.1)))
    };
    let octets = packed(&theirs);
    assert!(is_read_there::<oracle::Nfs3Result<U, G>>(&octets));
    (ours, octets)
}

/// A reply, and its results as the oracle writes them. Those of READDIR and READDIRPLUS are failures.
pub fn reply(number: u32, is_done: bool, parts: &Parts) -> (Reply, Vec<u8>) {
    let [first, second, _] = parts.attributes;
    let (wcc, wcc_of_other) = (parts.wcc(0), parts.wcc(1));
    let obj = parts.flags[0].then(|| parts.handle(0));
    let verf = WriteVerifier(parts.octets);
    let o_verf = oracle::writeverf3(parts.octets);
    let [word, ..] = parts.words;
    let created = Created { obj, obj_attributes: first, dir_wcc: wcc_of_other };
    macro_rules! created {
        ($reply:ident, $ok:ident, $fail:ident) => {{
            let theirs =
                oracle::$ok { obj: option(obj, o_handle), obj_attributes: o_post(first), dir_wcc: o_wcc(wcc_of_other) };
            let failed = (wcc, oracle::$fail { dir_wcc: o_wcc(wcc) });
            let (ours, octets) = outcome(parts, is_done, (created, theirs), failed);
            (Reply::$reply(ours), octets)
        }};
    }
    macro_rules! reply {
        ($reply:ident, $done:expr, $failed:expr) => {{
            let (ours, octets) = outcome(parts, is_done, $done, $failed);
            (Reply::$reply(ours), octets)
        }};
    }
    match number {
        procedure::NULL => (Reply::Null, Vec::new()),
        procedure::GETATTR => {
            let is = first.unwrap_or_else(|| parts.attributes[1].unwrap_or(ATTRIBUTES));
            reply!(GetAttr, (is, oracle::GETATTR3resok { obj_attributes: o_attributes(is) }), ((), Void))
        }
        procedure::SETATTR => reply!(
            SetAttr,
            (wcc, oracle::SETATTR3resok { obj_wcc: o_wcc(wcc) }),
            (wcc, oracle::SETATTR3resfail { obj_wcc: o_wcc(wcc) })
        ),
        procedure::LOOKUP => {
            let object = parts.handle(0);
            let theirs = oracle::LOOKUP3resok {
                object: o_handle(object),
                obj_attributes: o_post(first),
                dir_attributes: o_post(second),
            };
            reply!(
                Lookup,
                (Looked { object, obj_attributes: first, dir_attributes: second }, theirs),
                (second, oracle::LOOKUP3resfail { dir_attributes: o_post(second) })
            )
        }
        procedure::ACCESS => reply!(
            Access,
            (
                Accessible { obj_attributes: first, access: word },
                oracle::ACCESS3resok { obj_attributes: o_post(first), access: word }
            ),
            (first, oracle::ACCESS3resfail { obj_attributes: o_post(first) })
        ),
        procedure::READLINK => reply!(
            ReadLink,
            (
                ReadLinkDone { symlink_attributes: first, data: parts.item() },
                oracle::READLINK3resok { symlink_attributes: o_post(first), data: parts.data.clone().into() }
            ),
            (first, oracle::READLINK3resfail { symlink_attributes: o_post(first) })
        ),
        procedure::READ => {
            let (count, eof) = (parts.data.len() as u32, parts.flags[1]);
            let theirs = oracle::READ3resok {
                file_attributes: o_post(first),
                count,
                eof,
                data: Opaque::owned(parts.data.clone()),
            };
            reply!(
                Read,
                (ReadDone { file_attributes: first, eof, data: parts.item() }, theirs),
                (first, oracle::READ3resfail { file_attributes: o_post(first) })
            )
        }
        procedure::WRITE => {
            let done = WriteDone { file_wcc: wcc, count: word, committed: parts.stable, verf };
            let theirs = oracle::WRITE3resok {
                file_wcc: o_wcc(wcc),
                count: word,
                committed: o_stable(parts.stable),
                verf: o_verf,
            };
            reply!(Write, (done, theirs), (wcc, oracle::WRITE3resfail { file_wcc: o_wcc(wcc) }))
        }
        procedure::CREATE => created!(Create, CREATE3resok, CREATE3resfail),
        procedure::MKDIR => created!(MkDir, MKDIR3resok, MKDIR3resfail),
        procedure::SYMLINK => created!(SymLink, SYMLINK3resok, SYMLINK3resfail),
        procedure::MKNOD => created!(MkNod, MKNOD3resok, MKNOD3resfail),
        procedure::REMOVE => reply!(
            Remove,
            (wcc, oracle::REMOVE3resok { dir_wcc: o_wcc(wcc) }),
            (wcc, oracle::REMOVE3resfail { dir_wcc: o_wcc(wcc) })
        ),
        procedure::RMDIR => reply!(
            RmDir,
            (wcc, oracle::RMDIR3resok { dir_wcc: o_wcc(wcc) }),
            (wcc, oracle::RMDIR3resfail { dir_wcc: o_wcc(wcc) })
        ),
        procedure::RENAME => {
            let renamed = Renamed { fromdir_wcc: wcc, todir_wcc: wcc_of_other };
            let (fromdir_wcc, todir_wcc) = (o_wcc(wcc), o_wcc(wcc_of_other));
            let failed = oracle::RENAME3resfail { fromdir_wcc: o_wcc(wcc), todir_wcc: o_wcc(wcc_of_other) };
            reply!(Rename, (renamed, oracle::RENAME3resok { fromdir_wcc, todir_wcc }), (renamed, failed))
        }
        procedure::LINK => {
            let linked = Linked { file_attributes: parts.attributes[2], linkdir_wcc: wcc };
            let (file_attributes, linkdir_wcc) = (o_post(parts.attributes[2]), o_wcc(wcc));
            let failed = oracle::LINK3resfail { file_attributes: o_post(parts.attributes[2]), linkdir_wcc: o_wcc(wcc) };
            reply!(Link, (linked, oracle::LINK3resok { file_attributes, linkdir_wcc }), (linked, failed))
        }
        procedure::READDIR => {
            let failed = (first, oracle::READDIR3resfail { dir_attributes: o_post(first) });
            let (ours, octets) = outcome::<Listing, _, Void, _>(parts, false, (empty_listing(), Void), failed);
            (Reply::ReadDir(ours), octets)
        }
        procedure::READDIRPLUS => {
            let failed = (first, oracle::READDIRPLUS3resfail { dir_attributes: o_post(first) });
            let (ours, octets) = outcome::<Listing, _, Void, _>(parts, false, (empty_listing(), Void), failed);
            (Reply::ReadDirPlus(ours), octets)
        }
        procedure::FSSTAT => {
            let [tbytes, fbytes, abytes, tfiles, ffiles, afiles, _] = parts.hypers;
            let (obj_attributes, invarsec) = (first, word);
            let done = FsStat { obj_attributes, tbytes, fbytes, abytes, tfiles, ffiles, afiles, invarsec };
            let obj_attributes = o_post(first);
            let theirs =
                oracle::FSSTAT3resok { obj_attributes, tbytes, fbytes, abytes, tfiles, ffiles, afiles, invarsec };
            reply!(FsStat, (done, theirs), (first, oracle::FSSTAT3resfail { obj_attributes: o_post(first) }))
        }
        procedure::FSINFO => {
            let [rtmax, rtpref, rtmult, wtmax, wtpref, wtmult, dtpref, properties] = parts.words;
            let maxfilesize = parts.hypers[0];
            let time_delta = parts.time.unwrap_or(Time { seconds: 0, nseconds: 1 });
            let done = FsInfo {
                obj_attributes: first,
                rtmax,
                rtpref,
                rtmult,
                wtmax,
                wtpref,
                wtmult,
                dtpref,
                maxfilesize,
                time_delta,
                properties,
            };
            let theirs = oracle::FSINFO3resok {
                obj_attributes: o_post(first),
                rtmax,
                rtpref,
                rtmult,
                wtmax,
                wtpref,
                wtmult,
                dtpref,
                maxfilesize,
                time_delta: o_time(time_delta),
                properties,
            };
            reply!(FsInfo, (done, theirs), (first, oracle::FSINFO3resfail { obj_attributes: o_post(first) }))
        }
        procedure::PATHCONF => {
            let [linkmax, name_max, ..] = parts.words;
            let [no_trunc, chown_restricted, case_insensitive, case_preserving] = parts.flags;
            let done = PathConf {
                obj_attributes: first,
                linkmax,
                name_max,
                no_trunc,
                chown_restricted,
                case_insensitive,
                case_preserving,
            };
            let theirs = oracle::PATHCONF3resok {
                obj_attributes: o_post(first),
                linkmax,
                name_max,
                no_trunc,
                chown_restricted,
                case_insensitive,
                case_preserving,
            };
            reply!(PathConf, (done, theirs), (first, oracle::PATHCONF3resfail { obj_attributes: o_post(first) }))
        }
        procedure::COMMIT => reply!(
            Commit,
            (Synced { file_wcc: wcc, verf }, oracle::COMMIT3resok { file_wcc: o_wcc(wcc), verf: o_verf }),
            (wcc, oracle::COMMIT3resfail { file_wcc: o_wcc(wcc) })
        ),
        other => panic!("procedure {other}"),
    }
}

const ATTRIBUTES: Attributes = Attributes {
    kind: FileType::Directory,
    mode: 0o755,
    nlink: 2,
    uid: 1,
    gid: 2,
    size: 3,
    used: 4,
    rdev: Device::NONE,
    fsid: 5,
    fileid: FileId(6),
    atime: Time { seconds: 7, nseconds: 8 },
    mtime: Time { seconds: 9, nseconds: 10 },
    ctime: Time { seconds: 11, nseconds: 12 },
};

fn empty_listing() -> Listing {
    DirectoryPage::new(512, None, CookieVerifier([0; 8])).unwrap().finish(true).unwrap()
}
