//! `bulkhead doctor`.

mod checks;

use std::fmt::Write;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::str::FromStr;

use bulkhead::config::Config;
use bulkhead::error::Exit;
use bulkhead::machine::interfaces::{Interface, interfaces};
use bulkhead::machine::{SYSFS, rdma};
use serde::Serialize;

use super::serve::ConfigArgs;
use super::{Failure, print};

const EXAMPLES: &str = "\
Examples:
  bulkhead doctor                                  would `bulkhead serve` work here?
  bulkhead doctor --config /etc/bulkhead.toml      with the flags that `serve` will get
  bulkhead doctor 10.0.0.1 native+verbs://10.0.0.7:11212
                                                   which RDMA device and GID an address is, or is reached through
  bulkhead doctor --json | jq '.findings[] | select(.level != \"ok\")'

Each finding is `ok`, a `note` (it works, and could be better) or a `trouble` (serve would fail, or could not do all that is \
configured); what mends it stands below it. Nothing is changed. While a daemon runs, its ports and pool are troubles: they \
are taken.

Exit codes: 0 serve would work   1 something is wrong   64 usage   78 bad configuration";

/// Say what this machine can do for the daemon, and what mends what it cannot
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Addresses of this host or of others: IP, IP:PORT or a URL of a server
    #[arg(value_name = "ADDR")]
    addresses: Vec<Asked>,
    /// One JSON object: ok, findings (check, level, text, mend) and devices
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    config: ConfigArgs,
}

/// An address to find a device for.
#[derive(Clone, Debug, Eq, PartialEq)]
struct Asked {
    text: String,
    address: IpAddr,
}

impl FromStr for Asked {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let place = text.split_once("://").map_or(text, |(_, place)| place);
        let place = place.split(['?', '/']).next().unwrap_or_default();
        let socket = place.parse::<SocketAddr>().map(|address| address.ip());
        let address = socket.or_else(|_| place.trim_matches(['[', ']']).parse());
        let address =
            address.map_err(|_| format!("`{text}` has no numeric address: want IP, IP:PORT or a URL of those"));
        Ok(Self { text: text.to_owned(), address: address?.to_canonical() })
    }
}

/// How it stands with one thing.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Level {
    Ok,
    Note,
    Trouble,
}

/// What was found about one thing.
#[derive(Clone, Debug, Serialize)]
struct Finding {
    check: &'static str,
    level: Level,
    text: String,
    /// A command or a setting.
    #[serde(skip_serializing_if = "Option::is_none")]
    mend: Option<String>,
}

impl Finding {
    fn ok(check: &'static str, text: impl Into<String>) -> Self {
        Self { check, level: Level::Ok, text: text.into(), mend: None }
    }

    fn note(check: &'static str, text: impl Into<String>, mend: impl Into<String>) -> Self {
        Self { check, level: Level::Note, text: text.into(), mend: Some(mend.into()) }
    }

    fn trouble(check: &'static str, text: impl Into<String>, mend: impl Into<String>) -> Self {
        Self { check, level: Level::Trouble, text: text.into(), mend: Some(mend.into()) }
    }
}

/// All of it.
#[derive(Debug, Serialize)]
struct Report {
    /// `serve` would work.
    ok: bool,
    findings: Vec<Finding>,
    devices: Vec<rdma::Device>,
}

/// What the checks look at.
struct Patient {
    config: Config,
    interfaces: Vec<Interface>,
    devices: Vec<rdma::Device>,
}

pub fn run(args: Args) -> Result<Exit, Failure> {
    let config = args.config.load()?.daemon;
    let interfaces = interfaces()
        .map_err(|err| Failure::new(Exit::Unavailable, format!("cannot ask for the addresses of this host: {err}")))?;
    let patient = Patient { config, interfaces, devices: rdma::devices(Path::new(SYSFS)) };
    let findings = patient.findings(&args.addresses);
    let ok = findings.iter().all(|finding| finding.level != Level::Trouble);
    let report = Report { ok, findings, devices: patient.devices };
    if args.json {
        let text = serde_json::to_string(&report)
            .map_err(|err| Failure::new(Exit::Bug, format!("the report is no JSON: {err}")))?;
        print(&format!("{text}\n"))?;
    } else {
        print(&report.to_text())?;
    }
    Ok(if ok { Exit::Done } else { Exit::Refused })
}

impl Report {
    fn to_text(&self) -> String {
        let mut text = String::new();
        for Finding { check, level, text: found, mend } in &self.findings {
            let level = match level {
                Level::Ok => "ok",
                Level::Note => "note",
                Level::Trouble => "TROUBLE",
            };
            let _ = writeln!(text, "{level:<8} {check:<12} {found}");
            if let Some(mend) = mend {
                let _ = writeln!(text, "{:<8} {:<12} mend: {mend}", "", "");
            }
        }
        let count = self.findings.iter().filter(|finding| finding.level == Level::Trouble).count();
        let _ = match count {
            0 => writeln!(text, "serve would work"),
            1 => writeln!(text, "1 trouble: serve would fail, or could not do all that is configured"),
            _ => writeln!(text, "{count} troubles: serve would fail, or could not do all that is configured"),
        };
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_may_come_in_any_form() {
        let asked = |text: &str| text.parse::<Asked>().map(|asked| asked.address.to_string());
        for text in ["10.0.0.1", "10.0.0.1:7", "native+verbs://10.0.0.1:11212", "native+iwarp://10.0.0.1:1?crc=off"] {
            assert_eq!(asked(text).as_deref(), Ok("10.0.0.1"), "{text}");
        }
        for text in ["fd00::1", "[fd00::1]:7", "[fd00::1]", "memcache://[fd00::1]:11211"] {
            assert_eq!(asked(text).as_deref(), Ok("fd00::1"), "{text}");
        }
        assert_eq!(asked("::ffff:10.0.0.1").as_deref(), Ok("10.0.0.1"));
        for text in ["", "host", "host:1", "10.0.0", "memcache+unix:/run/b.sock"] {
            assert!(asked(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_trouble_shows_with_its_mend_and_counts() {
        let findings = vec![Finding::ok("a", "fine"), Finding::trouble("b", "broken", "hammer")];
        let report = Report { ok: false, findings, devices: Vec::new() };
        let text = report.to_text();
        assert!(text.contains("TROUBLE  b            broken\n") && text.contains("mend: hammer\n1 trouble"), "{text}");
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["findings"][0], serde_json::json!({ "check": "a", "level": "ok", "text": "fine" }));
        assert_eq!(json["findings"][1]["mend"], "hammer");
    }
}
