//! `bulkhead doctor` where there are RDMA devices: those of the VM in tests/rdma-vm, soft-RoCE and soft-iWARP.

use std::path::Path;
use std::process::Command;

use bulkhead::machine::interfaces::{interfaces, owner_of};
use bulkhead::machine::rdma::{devices, interfaces_of, resolve};
use bulkhead::machine::{SYSFS, numa};
use serde_json::Value;

mod rdma;

/// The VM's devices, their interfaces and addresses.
const BEDS: [(&str, &str, &str, &str); 2] =
    [(rdma::RXE.device, "rdma0", rdma::RXE.v4, rdma::RXE.v6), (rdma::SIW.device, "rdma1", rdma::SIW.v4, rdma::SIW.v6)];

fn has_devices() -> bool {
    let names: Vec<_> = devices(Path::new(SYSFS)).into_iter().map(|device| device.name).collect();
    let has = BEDS.iter().all(|(device, ..)| names.iter().any(|name| name == device));
    if !has {
        rdma::skipped(&format!("the doctor's devices are rxe0 and siw0; here are {names:?}"));
    }
    has
}

#[test]
fn addresses_lead_to_the_devices_that_the_kernel_gave_them() {
    if !has_devices() {
        return;
    }
    let (devices, interfaces) = (devices(Path::new(SYSFS)), interfaces().unwrap());
    for (device, interface, v4, v6) in BEDS {
        for address in [v4, v6] {
            let address = address.parse().unwrap();
            let owner = owner_of(&interfaces, address).unwrap();
            assert_eq!(owner.name, interface);
            let place = resolve(Path::new(SYSFS), &devices, address, Some(interface)).expect(device);
            assert_eq!((place.device.name.as_str(), place.port.number), (device, 1), "{address}");
            assert!(place.port.is_active(), "{place:?}");
            assert_eq!(place.device.is_iwarp, device == "siw0");
            if device == "rxe0" {
                let gid = place.gid.expect("a GID of the address");
                assert_eq!((gid.kind.as_str(), gid.interface.as_deref()), ("RoCE v2", Some(interface)));
            }
        }
        let found = devices.iter().find(|found| found.name == device).unwrap();
        assert!(interfaces_of(Path::new(SYSFS), found).iter().any(|name| name == interface), "{found:?}");
        assert_eq!(numa::node_of_interface(Path::new(SYSFS), interface), found.node);
    }
}

#[test]
fn the_doctor_names_the_devices() {
    if !has_devices() {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let pool = format!("{}:16MiB", home.path().join("pool").display());
    let flags = ["--memcache", "127.0.0.1:0", "--native", "native+iwarp://10.99.0.1:0", "--admin", "off", "--json"];
    let mut command = Command::new(env!("CARGO_BIN_EXE_bulkhead"));
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("BULKHEAD_")) {
        // They steer the tests, and the daemon would not know them.
        command.env_remove(name);
    }
    let output = command
        .arg("doctor")
        .args(BEDS.map(|(_, _, address, _)| address))
        .args(flags)
        .args(["--memory", "8MiB", "--head", "64KiB", "--pool", &pool])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let report: Value = serde_json::from_str(&said).unwrap();
    let devices = report["devices"].as_array().unwrap();
    let addresses: Vec<_> =
        report["findings"].as_array().unwrap().iter().filter(|found| found["check"] == "address").collect();
    for (at, (device, interface, address, _)) in BEDS.iter().enumerate() {
        assert!(
            devices.iter().any(|found| found["name"] == *device && found["ports"][0]["state"] == "ACTIVE"),
            "{said}"
        );
        let text = addresses[at]["text"].as_str().unwrap();
        assert!(text.starts_with(&format!("{address} is {interface}'s: {device} port 1, ")), "{text}");
    }
    println!("{said}");
}
