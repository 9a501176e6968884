//! Headers of ONC RPC under hostile octets: what is read is written back to the same octets, roundup aside.
#![no_main]

use bulkhead::wire::codec::{Reader, Writer};
use bulkhead::wire::onc_rpc::{AuthSys, CallError, CallHeader, Credential, MessageType, OpaqueAuth, ReplyHeader};
use libfuzzer_sys::fuzz_target;

fn check_credential(auth: &OpaqueAuth<'_>) {
    if let Ok(Credential::Sys(sys)) = auth.credential() {
        let body = sys.body();
        assert_eq!(body.len(), auth.body.len());
        assert_eq!(AuthSys::around(&body).credential(), Ok(Credential::Sys(sys)));
    }
}

fuzz_target!(|octets: &[u8]| {
    let mut reader = Reader::new(octets);
    match CallHeader::read(&mut reader) {
        Ok(call) => {
            assert_eq!(MessageType::of(octets), Some(MessageType::Call));
            let mut writer = Writer::new();
            call.write(&mut writer);
            assert_eq!((writer.len(), call.encoded_bytes()), (reader.offset(), reader.offset()));
            assert_eq!(CallHeader::read(&mut Reader::new(&writer.finish())), Ok(call));
            check_credential(&call.credential);
        }
        Err(CallError::NotACall) => assert_ne!(MessageType::of(octets), Some(MessageType::Call)),
        Err(CallError::Faulty { xid, fault }) => {
            let mut writer = Writer::new();
            let header = ReplyHeader { xid, reply: fault.reply() };
            header.write(&mut writer);
            assert_eq!(ReplyHeader::read(&mut Reader::new(&writer.finish())), Ok(header));
        }
    }
    let mut reader = Reader::new(octets);
    if let Ok(reply) = ReplyHeader::read(&mut reader) {
        assert_eq!(MessageType::of(octets), Some(MessageType::Reply));
        let mut writer = Writer::new();
        reply.write(&mut writer);
        assert_eq!(writer.len(), reader.offset());
        assert_eq!(ReplyHeader::read(&mut Reader::new(&writer.finish())), Ok(reply));
    }
});
