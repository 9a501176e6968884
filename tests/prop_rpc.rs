//! ONC RPC under random messages: what one side writes the other reads, and `nfs3_types` says the same.

use bulkhead::wire::codec::{Reader, Writer};
use bulkhead::wire::onc_rpc::{
    AcceptStatus, AuthStatus, AuthSys, CallHeader, Credential, Denial, OpaqueAuth, Reply, ReplyHeader, Versions, Xid,
};
use nfs3_types::rpc;
use nfs3_types::xdr_codec::{Opaque, Pack, Unpack};
use proptest::prelude::*;
use std::io::Cursor;

/// A credential or verifier with its body: of a flavor that both sides name.
fn auth() -> impl Strategy<Value = (u32, Vec<u8>)> {
    prop_oneof![
        Just((0, Vec::new())),
        (0_u32..4, prop::collection::vec(any::<u8>(), 0..=400)),
        (any::<u32>(), prop::collection::vec(any::<u8>(), 0..32), prop::collection::vec(any::<u32>(), 0..=16))
            .prop_map(|(number, machine_name, gids)| {
                let sys = AuthSys { stamp: number, machine_name: &machine_name, uid: number, gid: number ^ 1, gids };
                (1, sys.body())
            }),
    ]
}

fn oracle_auth((flavor, body): &(u32, Vec<u8>)) -> rpc::opaque_auth<'static> {
    let flavor = match flavor {
        0 => rpc::auth_flavor::AUTH_NULL,
        1 => rpc::auth_flavor::AUTH_UNIX,
        2 => rpc::auth_flavor::AUTH_SHORT,
        _ => rpc::auth_flavor::AUTH_DES,
    };
    rpc::opaque_auth { flavor, body: Opaque::owned(body.clone()) }
}

fn view((flavor, body): &(u32, Vec<u8>)) -> OpaqueAuth<'_> {
    OpaqueAuth { flavor: *flavor, body }
}

fn packed(message: &impl Pack) -> Vec<u8> {
    let mut out = Vec::new();
    message.pack(&mut out).unwrap();
    out
}

fn reply() -> impl Strategy<Value = Reply<'static>> {
    let versions = || (any::<u32>(), any::<u32>()).prop_map(|(low, high)| Versions { low, high });
    prop_oneof![
        Just(Reply::accepted(AcceptStatus::Success)),
        Just(Reply::accepted(AcceptStatus::ProgUnavail)),
        versions().prop_map(|versions| Reply::accepted(AcceptStatus::ProgMismatch(versions))),
        Just(Reply::accepted(AcceptStatus::ProcUnavail)),
        Just(Reply::accepted(AcceptStatus::GarbageArgs)),
        Just(Reply::accepted(AcceptStatus::SystemErr)),
        versions().prop_map(|versions| Reply::Denied(Denial::RpcMismatch(versions))),
        (0_u32..8).prop_map(|status| Reply::Denied(Denial::AuthError(AuthStatus(status)))),
    ]
}

fn oracle_reply(reply: Reply<'_>, verifier: &(u32, Vec<u8>)) -> rpc::reply_body<'static> {
    use rpc::{accept_stat_data, auth_stat, rejected_reply};
    match reply {
        Reply::Accepted { status, .. } => rpc::reply_body::MSG_ACCEPTED(rpc::accepted_reply {
            verf: oracle_auth(verifier),
            reply_data: match status {
                AcceptStatus::Success => accept_stat_data::SUCCESS,
                AcceptStatus::ProgUnavail => accept_stat_data::PROG_UNAVAIL,
                AcceptStatus::ProgMismatch(Versions { low, high }) => accept_stat_data::PROG_MISMATCH { low, high },
                AcceptStatus::ProcUnavail => accept_stat_data::PROC_UNAVAIL,
                AcceptStatus::GarbageArgs => accept_stat_data::GARBAGE_ARGS,
                AcceptStatus::SystemErr => accept_stat_data::SYSTEM_ERR,
            },
        }),
        Reply::Denied(denial) => rpc::reply_body::MSG_DENIED(match denial {
            Denial::RpcMismatch(Versions { low, high }) => rejected_reply::rpc_mismatch(low, high),
            Denial::AuthError(AuthStatus(status)) => {
                rejected_reply::auth_error(auth_stat::unpack(&mut Cursor::new(status.to_be_bytes())).unwrap().0)
            }
        }),
    }
}

proptest! {
    #[test]
    fn a_call_is_the_same_to_both_implementations(
        words in any::<[u32; 4]>(), credential in auth(), verifier in auth(), arguments in prop::collection::vec(any::<u8>(), 0..9),
    ) {
        let [xid, program, version, procedure] = words;
        let call = CallHeader {
            xid: Xid(xid), program, version, procedure, credential: view(&credential), verifier: view(&verifier),
        };
        let mut writer = Writer::new();
        call.write(&mut writer);
        prop_assert_eq!(writer.len(), call.encoded_bytes());
        let octets = writer.finish();
        let oracle = rpc::rpc_msg { xid, body: rpc::msg_body::CALL(rpc::call_body {
            rpcvers: 2, prog: program, vers: version, proc: procedure,
            cred: oracle_auth(&credential), verf: oracle_auth(&verifier),
        }) };
        prop_assert_eq!(&octets, &packed(&oracle));
        let message = [octets, arguments.clone()].concat();
        let mut reader = Reader::new(&message);
        prop_assert_eq!(CallHeader::read(&mut reader), Ok(call));
        prop_assert_eq!(reader.rest(), &arguments[..]);
    }

    #[test]
    fn a_reply_is_the_same_to_both_implementations(xid in any::<u32>(), reply in reply(), verifier in auth()) {
        let reply = match reply {
            Reply::Accepted { status, .. } => Reply::Accepted { verifier: view(&verifier), status },
            denied => denied,
        };
        let header = ReplyHeader { xid: Xid(xid), reply };
        let mut writer = Writer::new();
        header.write(&mut writer);
        let octets = writer.finish();
        let oracle = rpc::rpc_msg { xid, body: rpc::msg_body::REPLY(oracle_reply(reply, &verifier)) };
        prop_assert_eq!(&octets, &packed(&oracle));
        let mut reader = Reader::new(&octets);
        prop_assert_eq!(ReplyHeader::read(&mut reader), Ok(header));
        prop_assert_eq!(reader.left(), 0);
    }

    #[test]
    fn auth_sys_is_the_same_to_both_implementations(
        numbers in any::<[u32; 3]>(), name in prop::collection::vec(any::<u8>(), 0..=255), gids in prop::collection::vec(any::<u32>(), 0..=16),
    ) {
        let [stamp, uid, gid] = numbers;
        let sys = AuthSys { stamp, machine_name: &name, uid, gid, gids: gids.clone() };
        let oracle = rpc::auth_unix { stamp, machinename: Opaque::owned(name.clone()), uid, gid, gids };
        let body = sys.body();
        prop_assert_eq!(&body, &packed(&oracle));
        prop_assert_eq!(AuthSys::around(&body).credential(), Ok(Credential::Sys(sys.clone())));
    }

    #[test]
    fn any_octets_are_a_header_or_an_error(
        words in prop::collection::vec(prop_oneof![0_u32..8, any::<u32>()], 0..32), cut in 0_usize..4,
    ) {
        let mut octets: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
        octets.truncate(octets.len().saturating_sub(cut));
        let mut reader = Reader::new(&octets);
        if let Ok(call) = CallHeader::read(&mut reader) {
            let mut writer = Writer::new();
            call.write(&mut writer);
            prop_assert_eq!(writer.len(), reader.offset());
        }
        let mut reader = Reader::new(&octets);
        if let Ok(reply) = ReplyHeader::read(&mut reader) {
            let mut writer = Writer::new();
            reply.write(&mut writer);
            prop_assert_eq!(writer.len(), reader.offset());
        }
    }
}
