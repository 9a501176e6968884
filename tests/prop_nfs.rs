//! NFS version 3 and MOUNT version 3 against `nfs3_types`: what either writes the other reads as the same, for every
//! procedure, done and failed.

use bulkhead::programs::nfs::{self, *};
use bulkhead::programs::rpc::{ArgumentFault, Arguments, Data, Reduced, accept};
use bulkhead::programs::{mount, nfs::Reply, nfs::Request};
use bulkhead::wire::onc_rpc::record::{Mark, Piece, RecordDecoder, RecordLimits};
use nfs3::reply::reply;
use nfs3::request::request;
use nfs3::*;
use nfs3_types::nfs3 as oracle;
use nfs3_types::xdr_codec::{List, Opaque, Pack, Unpack};
use proptest::prelude::*;
use std::io::Cursor;

mod nfs3;

fn parse<'a>(stream: &'a [u8], chunks: &'a [Reduced]) -> Result<Request<'a>, ArgumentFault> {
    Request::parse(accept(&[&nfs::PROGRAM], Arguments { stream, chunks }).expect("the program has the procedure"))
}

fn numbers() -> impl Iterator<Item = u32> {
    nfs::PROGRAM.procedures.iter().map(|procedure| procedure.number)
}

proptest! {
    #[test]
    fn what_another_client_asks_is_understood(parts in parts()) {
        for number in numbers() {
            let (arguments, expected) = request(number, &parts);
            prop_assert_eq!(expected.procedure().number, number);
            let stream = call(nfs::PROGRAM_NUMBER, number, &arguments);
            prop_assert_eq!(parse(&stream, &[]), Ok(expected));
        }
    }

    #[test]
    fn what_may_be_reduced_is_found_in_its_chunk(parts in parts(), is_padded in any::<bool>()) {
        for number in [procedure::WRITE, procedure::SYMLINK] {
            let (arguments, mut expected) = request(number, &parts);
            let data = match &mut expected {
                Request::Write(write) => &mut write.data,
                Request::SymLink(link) => &mut link.path,
                other => panic!("{other:?}"),
            };
            let len = parts.data.len();
            *data = Data::Chunk { index: 0, len: len as u32 };
            let stream = call(nfs::PROGRAM_NUMBER, number, &arguments[..arguments.len() - len.next_multiple_of(4)]);
            let chunk_bytes = if is_padded { len.next_multiple_of(4) } else { len };
            let chunks = [Reduced { position: stream.len() as u64, len: chunk_bytes as u64 }];
            prop_assert_eq!(parse(&stream, &chunks), Ok(expected));
            if number == procedure::WRITE {
                let whole = call(nfs::PROGRAM_NUMBER, number, &arguments);
                let found = Bulk::Data { position: stream.len(), len: len as u32 };
                prop_assert_eq!(Bulk::find(&whole), found);
                prop_assert_eq!(Bulk::find(&stream), found);
            }
        }
    }

    #[test]
    fn on_a_byte_stream_the_data_of_a_write_is_never_with_its_head(
        parts in parts(), fragment_bytes in 1_usize..400, part_bytes in 1_usize..300,
    ) {
        let mut stream = Vec::new();
        for number in numbers() {
            let message = call(nfs::PROGRAM_NUMBER, number, &request(number, &parts).0);
            let last = message.len().div_ceil(fragment_bytes) - 1;
            for (at, fragment) in message.chunks(fragment_bytes).enumerate() {
                stream.extend(Mark { is_last: at == last, len: fragment.len() as u32 }.octets());
                stream.extend(fragment);
            }
        }
        let mut decoder = RecordDecoder::new(RecordLimits { bytes_max: 2000, fragments_max: 2000 });
        let (mut head, mut bulk, mut reduced) = (Vec::new(), Vec::new(), None);
        let mut numbers = numbers();
        for mut part in stream.chunks(part_bytes) {
            while let Some(piece) = decoder.next(&mut part, usize::MAX).unwrap() {
                match piece {
                    Piece::Octets(octets) if reduced.is_some() => bulk.extend_from_slice(octets),
                    Piece::Octets(octets) => {
                        head.extend_from_slice(octets);
                        if let Bulk::Data { position, len } = Bulk::find(&head) {
                            bulk = head.split_off(position);
                            reduced = Some(Reduced { position: position as u64, len: len.into() });
                        }
                    }
                    Piece::End => {
                        let number = numbers.next().unwrap();
                        let mut expected = request(number, &parts).1;
                        if let Request::Write(write) = &mut expected {
                            write.data = Data::Chunk { index: 0, len: parts.data.len() as u32 };
                            prop_assert_eq!(&bulk[..parts.data.len()], &parts.data[..]);
                            prop_assert_eq!(bulk.len(), parts.data.len().next_multiple_of(4));
                        }
                        prop_assert_eq!(parse(&head, reduced.as_slice()), Ok(expected));
                        (head, bulk, reduced) = (Vec::new(), Vec::new(), None);
                    }
                }
            }
        }
        prop_assert!(decoder.is_between_records() && numbers.next().is_none());
    }

    #[test]
    fn arguments_cut_anywhere_or_with_something_behind_them_are_garbage(parts in parts()) {
        for number in numbers() {
            let (arguments, _) = request(number, &parts);
            let stream = call(nfs::PROGRAM_NUMBER, number, &arguments);
            for cut in CALL_HEADER_BYTES..stream.len() {
                let fault = parse(&stream[..cut], &[]).unwrap_err();
                prop_assert!(matches!(fault, ArgumentFault::Xdr(_)), "procedure {} cut at {}: {}", number, cut, fault);
            }
            let longer = [&stream[..], &[0; 4]].concat();
            prop_assert!(matches!(parse(&longer, &[]), Err(ArgumentFault::Xdr(_))), "procedure {}", number);
        }
    }

    #[test]
    fn arguments_with_any_octet_changed_are_understood_or_refused(
        parts in parts(), at in any::<prop::sample::Index>(), octet in any::<u8>(),
    ) {
        for number in numbers().skip(1) {
            let (mut arguments, _) = request(number, &parts);
            let at = at.index(arguments.len());
            arguments[at] = octet;
            let stream = call(nfs::PROGRAM_NUMBER, number, &arguments);
            if let Ok(request) = parse(&stream, &[]) {
                prop_assert_eq!(request.procedure().number, number);
            }
        }
    }
}
proptest! {
    #[test]
    fn what_is_answered_is_what_another_server_answers(parts in parts()) {
        for (number, is_done) in numbers().flat_map(|number| [(number, true), (number, false)]) {
            let (reply, expected) = reply(number, is_done, &parts);
            prop_assert_eq!(reply.procedure().number, number);
            let payload = reply.encode(XID);
            prop_assert_eq!(results(&payload, &parts.data), expected, "procedure {}, done: {}", number, is_done);
            let (arguments, _) = request(number, &parts);
            let stream = call(nfs::PROGRAM_NUMBER, number, &arguments);
            let bound = parse(&stream, &[]).unwrap().reply_bound();
            let items: u64 = payload.items().map(|item| u64::from(item.len).next_multiple_of(4)).sum();
            prop_assert!(payload.stream_bytes() - items <= bound.reduced_bytes, "procedure {}", number);
            prop_assert!(payload.items().count() <= usize::from(bound.item_bytes.is_some()), "procedure {}", number);
        }
    }

    #[test]
    fn a_page_of_a_directory_is_read_there_and_as_long_as_it_may_be(
        names in prop::collection::vec(octets(255), 0..12), base in 1_u64..u64::MAX - 99,
        count in 0_u32..2500, dir in prop::option::of(attributes()), verifier in any::<[u8; 8]>(), is_end in any::<bool>(),
    ) {
        let entry = |at: usize| Entry { fileid: FileId(base ^ 1), name: &names[at], cookie: Cookie(base + at as u64) };
        let page = |len: usize, eof: bool| oracle::READDIR3resok {
            dir_attributes: o_post(dir),
            cookieverf: oracle::cookieverf3(verifier),
            reply: oracle::dirlist3 {
                entries: List((0..len).map(|at| {
                    let Entry { fileid, name, cookie } = entry(at);
                    oracle::entry3 { fileid: fileid.0, name: name.into(), cookie: cookie.0 }
                }).collect()),
                eof,
            },
        };
        // The longest that the count allows.
        let fits = (0..=names.len()).rev().find(|len| page(*len, false).packed_size() <= count as usize);
        let ours = DirectoryPage::new(count, dir.as_ref(), CookieVerifier(verifier)).and_then(|mut ours| {
            for at in 0..names.len() {
                assert_eq!(ours.push(&entry(at)), fits.is_some_and(|fits| at < fits));
            }
            ours.finish(is_end)
        });
        match fits {
            Some(fits) if fits > 0 || names.is_empty() => {
                let reply = Reply::ReadDir(ours.map_err(|error| panic!("{error:?}")));
                let octets = results(&reply.encode(XID), &[]);
                let expected = oracle::READDIR3res::Ok(page(fits, is_end && fits == names.len()));
                prop_assert_eq!(&octets, &packed(&expected));
                prop_assert!(is_read_there::<oracle::READDIR3res<'static>>(&octets));
                let bound = Request::ReadDir(ReadDirectory {
                    dir: FileHandle::new(b"").unwrap(), cookie: Cookie(0), verifier: CookieVerifier([0; 8]), count,
                }).reply_bound();
                prop_assert!((REPLY_HEADER_BYTES + octets.len()) as u64 <= bound.reduced_bytes);
            }
            _ => prop_assert_eq!(ours, Err(NfsError::TooSmall)),
        }
    }

    #[test]
    fn a_page_with_attributes_keeps_to_both_counts(
        entries in prop::collection::vec((octets(255), prop::option::of(attributes()), prop::option::of(octets(64))), 0..10),
        base in 1_u64..u64::MAX - 99, dircount in 0_u32..2000, maxcount in 0_u32..4000,
        dir in prop::option::of(attributes()), verifier in any::<[u8; 8]>(), is_end in any::<bool>(),
    ) {
        let entry = |at: usize| {
            let (name, attributes, handle) = &entries[at];
            let handle = handle.as_ref().map(|handle| FileHandle::new(handle).unwrap());
            let entry = Entry { fileid: FileId(base ^ 1), name, cookie: Cookie(base + at as u64) };
            EntryPlus { entry, attributes: *attributes, handle }
        };
        let page = |len: usize, eof: bool| oracle::READDIRPLUS3resok {
            dir_attributes: o_post(dir),
            cookieverf: oracle::cookieverf3(verifier),
            reply: oracle::dirlistplus3 {
                entries: List((0..len).map(|at| {
                    let EntryPlus { entry: Entry { fileid, name, cookie }, attributes, handle } = entry(at);
                    oracle::entryplus3 {
                        fileid: fileid.0, name: name.into(), cookie: cookie.0,
                        name_attributes: o_post(attributes), name_handle: option(handle, o_handle),
                    }
                }).collect()),
                eof,
            },
        };
        // What counts against dircount: a word that says there is one, and what READDIR has of it.
        let dir_bytes = |len: usize| (0..len).map(|at| {
            let Entry { fileid, name, cookie } = entry(at).entry;
            4 + oracle::entry3 { fileid: fileid.0, name: name.into(), cookie: cookie.0 }.packed_size()
        }).sum::<usize>();
        let fits = (0..=entries.len()).rev().find(|len| {
            page(*len, false).packed_size() <= maxcount as usize && dir_bytes(*len) <= dircount as usize
        });
        let ours = PlusPage::new(dircount, maxcount, dir.as_ref(), CookieVerifier(verifier)).and_then(|mut ours| {
            for at in 0..entries.len() {
                assert_eq!(ours.push(&entry(at)), fits.is_some_and(|fits| at < fits));
            }
            ours.finish(is_end)
        });
        match fits {
            Some(fits) if fits > 0 || entries.is_empty() => {
                let reply = Reply::ReadDirPlus(ours.map_err(|error| panic!("{error:?}")));
                let octets = results(&reply.encode(XID), &[]);
                let expected = oracle::READDIRPLUS3res::Ok(page(fits, is_end && fits == entries.len()));
                prop_assert_eq!(&octets, &packed(&expected));
                prop_assert!(is_read_there::<oracle::READDIRPLUS3res<'static>>(&octets));
            }
            _ => prop_assert_eq!(ours, Err(NfsError::TooSmall)),
        }
    }
}

#[test]
fn errors_and_types_are_those_of_the_oracle() {
    for error in NfsError::ALL {
        assert_eq!(o_error(*error) as u32, error.number());
        assert_eq!(NfsError::from_number(error.number()), Some(*error));
    }
    let known =
        (0..20_000).filter(|number| oracle::nfsstat3::unpack(&mut Cursor::new(u32::to_be_bytes(*number))).is_ok());
    // All but NFS3_OK, which is no error.
    assert_eq!(known.skip(1).collect::<Vec<_>>(), NfsError::ALL.iter().map(|error| error.number()).collect::<Vec<_>>());
    for kind in FileType::ALL {
        assert_eq!(o_kind(*kind) as u32, kind.number());
    }
    for procedure in nfs::PROGRAM.procedures {
        let theirs = oracle::NFS_PROGRAM::try_from(procedure.number).unwrap();
        assert_eq!(theirs.to_string(), format!("NFSPROC3_{}", procedure.name));
    }
}

// ------------------------------------------------------------------------------------------------------------------ MOUNT

mod mounting {
    use super::*;
    use mount::{Export, Mount, MountError, Mounted};
    use nfs3_types::mount as oracle;

    fn parse(stream: &[u8]) -> Result<mount::Request<'_>, ArgumentFault> {
        mount::Request::parse(accept(&[&mount::PROGRAM], Arguments { stream, chunks: &[] }).unwrap())
    }

    fn answered(reply: &mount::Reply) -> Vec<u8> {
        results(&reply.encode(XID), &[])
    }

    proptest! {
        #[test]
        fn directories_are_mounted_and_given_back(directory in octets(1024)) {
            let arguments = packed(&oracle::dirpath(Opaque::borrowed(&directory)));
            for (number, expected) in [
                (mount::procedure::MNT, mount::Request::Mnt { directory: &directory }),
                (mount::procedure::UMNT, mount::Request::Umnt { directory: &directory }),
            ] {
                let stream = call(mount::PROGRAM_NUMBER, number, &arguments);
                prop_assert_eq!(parse(&stream), Ok(expected));
                for cut in CALL_HEADER_BYTES..stream.len() {
                    prop_assert!(parse(&stream[..cut]).is_err());
                }
            }
            for number in [0, 2, 4, 5] {
                prop_assert!(parse(&call(mount::PROGRAM_NUMBER, number, &[])).is_ok());
                prop_assert!(parse(&call(mount::PROGRAM_NUMBER, number, &arguments)).is_err());
            }
        }

        #[test]
        fn a_mount_is_answered_as_another_server_does(
            handle in octets(64), flavors in prop::collection::vec(any::<u32>(), 0..=mount::FLAVORS_MAX),
        ) {
            let fhandle = oracle::fhandle3(Opaque::owned(handle.clone()));
            let theirs = oracle::mountres3::Ok(oracle::mountres3_ok { fhandle, auth_flavors: flavors.clone() });
            let ours = mount::Reply::Mnt(Ok(Mounted { handle: FileHandle::new(&handle).unwrap(), flavors }));
            let octets = answered(&ours);
            prop_assert_eq!(&octets, &packed(&theirs));
            prop_assert!(is_read_there::<oracle::mountres3<'static>>(&octets));
        }

        #[test]
        fn lists_are_those_of_another_server(
            mounts in prop::collection::vec((octets(255), octets(1024)), 0..6),
            exports in prop::collection::vec((octets(1024), prop::collection::vec(octets(255), 0..4)), 0..5),
        ) {
            let theirs = List(mounts.iter().map(|(host, directory)| oracle::mountbody {
                ml_hostname: oracle::name(Opaque::borrowed(host)),
                ml_directory: oracle::dirpath(Opaque::borrowed(directory)),
            }).collect());
            let ours = mounts.iter().map(|(host, directory)| Mount { host: host.clone(), directory: directory.clone() });
            let octets = answered(&mount::Reply::Dump(ours.collect()));
            prop_assert_eq!(&octets, &packed(&theirs));
            prop_assert!(is_read_there::<oracle::mountlist<'static, 'static>>(&octets));
            let theirs = List(exports.iter().map(|(directory, groups)| oracle::export_node {
                ex_dir: oracle::dirpath(Opaque::borrowed(directory)),
                ex_groups: List(groups.iter().map(|group| oracle::name(Opaque::borrowed(group))).collect()),
            }).collect());
            let ours = exports.iter().map(|(directory, groups)| Export {
                directory: directory.clone(), groups: groups.clone(),
            });
            let octets = answered(&mount::Reply::Export(ours.collect()));
            prop_assert_eq!(&octets, &packed(&theirs));
            prop_assert!(is_read_there::<oracle::exports<'static, 'static>>(&octets));
        }
    }

    #[test]
    fn errors_are_those_of_the_oracle() {
        for error in MountError::ALL {
            let octets = answered(&mount::Reply::Mnt(Err(*error)));
            assert!(is_read_there::<oracle::mountres3<'static>>(&octets), "{error:?}");
            let name = format!("{}", oracle::mountstat3::unpack(&mut Cursor::new(&octets)).unwrap().0);
            assert_eq!(name, format!("MNT3ERR_{}", format!("{error:?}").to_uppercase()));
        }
        let known = (1..20_000)
            .filter(|number| oracle::mountstat3::unpack(&mut Cursor::new(u32::to_be_bytes(*number))).is_ok());
        assert_eq!(known.count(), MountError::ALL.len());
        for procedure in mount::PROGRAM.procedures {
            let theirs = oracle::MOUNT_PROGRAM::try_from(procedure.number).unwrap();
            assert_eq!(theirs.to_string(), format!("MOUNTPROC3_{}", procedure.name));
        }
    }

    #[test]
    fn what_has_no_results_is_answered_with_none() {
        for reply in [mount::Reply::Null, mount::Reply::Umnt, mount::Reply::UmntAll] {
            assert_eq!(answered(&reply), Vec::<u8>::new());
        }
    }
}
