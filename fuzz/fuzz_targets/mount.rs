//! MOUNT version 3 under hostile octets: the arguments of every procedure. Input: `[procedure: 1 | arguments…]`.
#![no_main]

use bulkhead::programs::mount::{PATH_BYTES_MAX, PROGRAM, PROGRAM_NUMBER, Request, VERSION};
use bulkhead::programs::rpc::{Arguments, accept};
use bulkhead::wire::codec::Writer;
use bulkhead::wire::onc_rpc::{CallHeader, OpaqueAuth, Xid};
use libfuzzer_sys::fuzz_target;

fn call(procedure: u32, arguments: impl FnOnce(&mut Writer)) -> Vec<u8> {
    let (program, version, credential, verifier) = (PROGRAM_NUMBER, VERSION, OpaqueAuth::NONE, OpaqueAuth::NONE);
    let mut writer = Writer::new();
    CallHeader { xid: Xid(7), program, version, procedure, credential, verifier }.write(&mut writer);
    arguments(&mut writer);
    writer.finish()
}

fuzz_target!(|input: &[u8]| {
    let [number, arguments @ ..] = input else { return };
    let number = u32::from(*number) % PROGRAM.procedures.len() as u32;
    let stream = call(number, |words| words.encoded(arguments));
    let call_of = |stream| accept(&[&PROGRAM], Arguments { stream, chunks: &[] }).expect("the header is good");
    let Ok(request) = Request::parse(call_of(&stream)) else { return };
    assert_eq!(request.procedure().number, number);
    let again = call(number, |words| match request {
        Request::Mnt { directory } | Request::Umnt { directory } => {
            assert!(directory.len() <= PATH_BYTES_MAX);
            words.opaque(directory);
        }
        Request::Null | Request::Dump | Request::UmntAll | Request::Export => assert!(arguments.is_empty()),
    });
    assert_eq!(again.len(), stream.len());
    assert_eq!(Request::parse(call_of(&again)), Ok(request));
});
