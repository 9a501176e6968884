use super::*;

const EXAMPLE: &str = include_str!("../../configs/bulkhead.toml");
const SMALL: &str = include_str!("../../configs/small.toml");

fn load(toml: &str, environment: &[(&str, &str)], flags: &Flags) -> Result<Settings, ConfigError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bulkhead.toml");
    fs::write(&path, toml).unwrap();
    let environment = environment.iter().map(|(name, value)| (name.to_string(), value.to_string()));
    Settings::load(Some(&path), environment, flags)
}

fn refusal(toml: &str) -> String {
    load(toml, &[], &Flags::default()).unwrap_err().to_string()
}

fn keys(prefix: &str, table: &toml::Table, into: &mut Vec<String>) {
    for (key, value) in table {
        match value {
            toml::Value::Table(inner) => keys(&format!("{prefix}{key}."), inner, into),
            _ => into.push(format!("{prefix}{key}")),
        }
    }
}

#[test]
fn the_small_daemon_passes_its_own_checks() {
    let config = Config::small("/var/tmp/nowhere");
    config.check().unwrap();
    assert_eq!((config.lanes, config.listen.memcache[0].port(), config.listen.admin), (1, 0, None));
    assert_eq!(config.store.pools[0].bytes, Some(64 << 20));
}

#[test]
fn the_example_file_equals_the_defaults() {
    assert_eq!(toml::from_str::<File>(EXAMPLE).unwrap(), File::default());
    assert_eq!(load(EXAMPLE, &[], &Flags::default()).unwrap(), load("", &[], &Flags::default()).unwrap());
}

#[test]
fn the_example_file_mentions_every_key_and_explains_it() {
    let (mut all, mut shown) = (Vec::new(), Vec::new());
    keys("", &toml::from_str(&toml::to_string(&File::default()).unwrap()).unwrap(), &mut all);
    keys("", &toml::from_str(EXAMPLE).unwrap(), &mut shown);
    all.sort();
    shown.sort();
    assert_eq!(shown, all);
    let lines: Vec<_> = EXAMPLE.lines().collect();
    for pair in lines.windows(2) {
        let is_key = !pair[1].starts_with(['#', '[']) && pair[1].contains('=');
        assert!(!is_key || pair[0].starts_with('#'), "no comment above `{}`", pair[1]);
    }
}

#[test]
fn the_small_file_is_accepted() {
    let small = load(SMALL, &[], &Flags::default()).unwrap();
    assert_eq!(small.daemon.store.memory_bytes, 64 * MIB);
}

#[test]
fn printed_settings_read_back_the_same() {
    let toml = "lanes = 3\npin = [4, 2]\n[listen]\nunix = [\"/run/b.sock\"]\nadmin = \"off\"\nrpc = [\"rpc+iwarp://127.0.0.1:9\"]\n[store]\nmemory = \"100MiB\"\n\
            value_max = 1000001\npinned_share = 0.5\npools = [\"/a:4GiB\", { dir = \"/b:7\" }]\n\
            [timers]\nidle_timeout = \"1500ms\"\n[native]\nallow = [\"10.0.0.0/8\", \"::1\"]\n[nfs]\nallow = []\nroot_squash = true\nuid = 7\ngid = 8\nfsid = 9\n[rpc]\nrpcbind = \"/run/b.sock\"\ninline = \"8KiB\"\ncredits = 7\nreads = 3\nlong = \"64KiB\"\nsegments = 99\n[log]\nformat = \"json\"";
    for toml in ["", toml] {
        let settings = load(toml, &[], &Flags::default()).unwrap();
        assert_eq!(load(&settings.to_toml(), &[], &Flags::default()).unwrap(), settings);
    }
}

#[test]
fn each_layer_overrides_the_one_below() {
    let file = "[store]\nmemory = \"32MiB\"\nhead = \"64KiB\"\nvalue_max = \"1MiB\"";
    let environment = [("BULKHEAD_STORE__MEMORY", "64MiB"), ("BULKHEAD_STORE__HEAD", "128KiB")];
    let flags = Flags { memory: Some(ByteSize(128 * MIB)), ..Flags::default() };
    let store = load(file, &environment, &flags).unwrap().daemon.store;
    assert_eq!((store.memory_bytes, store.head_bytes, store.value_bytes_max), (128 * MIB, 128 * KIB, MIB));
    assert_eq!(store.index_bytes_max, 72 * MIB);
}

#[test]
fn every_kind_of_value_can_come_from_the_environment() {
    let environment = [
        ("BULKHEAD_LANES", "2"),
        ("BULKHEAD_PIN", "0,2-3"),
        ("BULKHEAD_NATIVE__ALLOW", "10.0.0.0/8, fd00::/8"),
        ("BULKHEAD_LISTEN__MEMCACHE", "127.0.0.1:1, [::1]:2"),
        ("BULKHEAD_LISTEN__UNIX", "/run/b.sock"),
        ("BULKHEAD_LISTEN__ADMIN", "off"),
        ("BULKHEAD_STORE__POOLS", "/a:4GiB,/b"),
        ("BULKHEAD_STORE__PINNED_SHARE", "0.5"),
        ("BULKHEAD_LIMITS__CONNECTIONS_MAX", "7"),
        ("BULKHEAD_TIMERS__IDLE_TIMEOUT", "2m"),
        ("BULKHEAD_SERVER", "memcache://elsewhere:1"),
        ("HOME", "/nowhere"),
    ];
    let daemon = load("", &environment, &Flags::default()).unwrap().daemon;
    assert_eq!((daemon.lanes, daemon.pin), (2, Pin::Cores(vec![0, 2, 3])));
    assert_eq!(daemon.native.allow, ["10.0.0.0/8".parse().unwrap(), "fd00::/8".parse().unwrap()]);
    assert_eq!(daemon.listen.memcache, ["127.0.0.1:1".parse().unwrap(), "[::1]:2".parse().unwrap()]);
    assert_eq!(daemon.listen.unix, [PathBuf::from("/run/b.sock")]);
    assert_eq!(daemon.listen.admin, None);
    let (a, b) = (&daemon.store.pools[0], &daemon.store.pools[1]);
    assert_eq!((a.dir.to_str(), a.bytes, b.dir.to_str(), b.bytes), (Some("/a"), Some(4 * GIB), Some("/b"), None));
    assert_eq!((daemon.store.pinned_share, daemon.limits.connections_max), (0.5, 7));
    assert_eq!(daemon.timers.idle_timeout, Some(Duration::from_secs(120)));
}

#[test]
fn every_flag_reaches_its_key() {
    let flags = Flags {
        memcache: Some(vec![]),
        unix: Some(vec!["/run/b.sock".into()]),
        native: Some(vec!["native+iwarp://127.0.0.1:7?crc=off".parse().unwrap()]),
        admin: Some(Switch::Off),
        pools: vec![PoolConfig { dir: "/a".into(), bytes: Some(5 * MIB) }],
        memory: Some(ByteSize(16 * MIB)),
        head: Some(ByteSize(64 * KIB)),
        value_max: Some(ByteSize(3)),
        native_allow: vec!["10.0.0.0/8".parse().unwrap()],
        rpc: Some(vec!["rpc+iwarp://127.0.0.1:9".parse().unwrap()]),
        rpc_allow: vec!["fd00::/8".parse().unwrap()],
        rpcbind: Some(Switch::On("/run/rpcbind.sock".to_owned())),
        nfs_tcp: Some(vec!["127.0.0.1:2049".parse().unwrap()]),
        nfs_allow: vec!["10.1.0.0/16".parse().unwrap()],
        nfs_root_squash: true,
        lanes: Some(5),
        pin: Some(Pin::Cores(vec![1, 0])),
        log_level: Some("bulkhead=debug".to_owned()),
        log_format: Some(LogFormat::Json),
    };
    let Settings { daemon, log } = load("", &[], &flags).unwrap();
    assert!(daemon.listen.memcache.is_empty() && daemon.listen.admin.is_none());
    assert_eq!(daemon.listen.native, flags.native.unwrap());
    assert_eq!((daemon.native.allow, Some(daemon.pin)), (flags.native_allow, flags.pin));
    assert_eq!((daemon.listen.rpc, daemon.rpc.allow), (flags.rpc.unwrap(), flags.rpc_allow));
    assert_eq!(daemon.rpc.rpcbind, Some("/run/rpcbind.sock".into()));
    assert_eq!((daemon.listen.nfs_tcp, daemon.nfs.allow), (flags.nfs_tcp.unwrap(), flags.nfs_allow));
    assert!(daemon.nfs.root_squash);
    assert_eq!((daemon.listen.unix, daemon.store.pools, daemon.lanes), (flags.unix.unwrap(), flags.pools, 5));
    assert_eq!((daemon.store.memory_bytes, daemon.store.head_bytes), (16 * MIB, 64 * KIB));
    assert_eq!(daemon.store.value_bytes_max, 3);
    assert_eq!(log, LogConfig { level: "bulkhead=debug".to_owned(), format: LogFormat::Json });
}

#[test]
fn unknown_keys_are_refused_by_name_in_every_layer() {
    for (toml, key) in [("speed = 1", "speed"), ("[store]\nmemroy = 1", "memroy"), ("[stroe]\nmemory = 1", "stroe")] {
        let text = refusal(toml);
        assert!(text.contains(key) && text.contains("bulkhead.toml") && !text.contains('\n'), "{text}");
    }
    let text = refusal("[store]\npools = [{ dir = \"/a\", szie = 1 }]");
    assert!(text.contains("szie"), "{text}");
    for name in ["BULKHEAD_STORE__MEMROY", "BULKHEAD_MEMORY"] {
        let text = load("", &[(name, "64MiB")], &Flags::default()).unwrap_err().to_string();
        assert!(text.contains("unknown field"), "{text}");
    }
}

#[test]
fn relations_are_refused_with_both_numbers() {
    let cases = [
        ("[store]\nmemory = \"7MiB\"", "7MiB", "8MiB"),
        ("[store]\nmemory = \"10000KiB\"", "10000KiB", "1MiB"),
        ("[store]\nmemory = \"8MiB\"\nhead = \"4MiB\"", "4MiB", "8MiB"),
        ("[store]\nhead = \"100KiB\"", "100KiB", "64KiB"),
        ("[store]\nhead = 0", "0", "64KiB"),
        ("[store]\nstaging = \"300KiB\"", "300KiB", "256KiB"),
        ("[store]\nstaging = \"1MiB\"", "1MiB", "32"),
        ("[store]\nvalue_max = 0", "0", "value_max"),
        ("[store]\nindex_bytes_max = 9", "9", "1MiB"),
        ("[store]\npinned_share = 0.0", "0", "1"),
        ("[store]\npinned_share = 1.5", "1.5", "1"),
        ("[store]\ndisk_depth = 0", "0", "1024"),
        ("[store]\npools = [\"/a:5\"]", "/a", "5"),
        ("[store]\npools = [\"/a\", \"/a/b\"]", "/a", "/a/b"),
        ("[listen]\nmemcache = []\nnative = []", "memcache", "unix"),
        ("[listen]\nadmin = \"127.0.0.1:11211\"", "127.0.0.1:11211", "twice"),
        ("[limits]\nline_bytes_max = 100", "100", "2048"),
        ("[limits]\nconnections_max = 0", "0", "1"),
        ("[timers]\nreserve_wait = \"500ms\"", "500ms", "1s"),
        ("[timers]\nstall_timeout = \"0s\"", "stall_timeout", "0s"),
        ("[log]\nlevel = \"bulkhead=noise\"", "bulkhead=noise", "level"),
        ("lanes = 0", "0", "1024"),
        ("[rpc]\nrpcbind = \"/run/b.sock\"", "/run/b.sock", "listen.rpc has no door"),
        ("[rpc]\nrpcbind = \"on\"", "on", "absolute path"),
    ];
    for (toml, first, second) in cases {
        let text = refusal(toml);
        assert!(text.contains(first) && text.contains(second), "{toml}: {text}");
    }
    let long = format!("[listen]\nunix = [\"/{}\"]", "x".repeat(107));
    assert!(refusal(&long).contains("108") && refusal(&long).contains("107"));
    let long = format!("[rpc]\nrpcbind = \"/{}\"", "x".repeat(107));
    assert!(refusal(&long).contains("108") && refusal(&long).contains("107"));
}

#[test]
fn values_of_the_wrong_form_are_refused_with_the_value() {
    for (toml, value) in [
        ("[store]\nmemory = \"4 parsecs\"", "4 parsecs"),
        ("[store]\nmemory = -1", "-1"),
        ("[store]\nmemory = \"9000000TiB\"", "9000000TiB"),
        ("[timers]\nstall_timeout = 5", "5"),
        ("[listen]\nadmin = \"localhost\"", "localhost"),
        ("[log]\nformat = \"xml\"", "xml"),
        ("[native]\nallow = [\"10.0.0.1/8\"]", "10.0.0.1/8"),
        ("pin = \"everywhere\"", "everywhere"),
        ("pin = []", "pin"),
        ("pin = [-1]", "-1"),
    ] {
        let text = refusal(toml);
        assert!(text.contains(value), "{toml}: {text}");
    }
    let text = load("", &[("BULKHEAD_STORE__MEMORY", "4 parsecs")], &Flags::default()).unwrap_err().to_string();
    assert!(text.contains("4 parsecs"), "{text}");
    let text = Settings::load(Some(Path::new("/no/such.toml")), [], &Flags::default()).unwrap_err().to_string();
    assert!(text.contains("/no/such.toml"), "{text}");
}

#[test]
fn what_follows_the_last_colon_of_a_pool_is_a_size_or_has_a_slash() {
    let pool = |text: &str| text.parse::<PoolConfig>();
    assert_eq!(pool("/a:4GiB"), Ok(PoolConfig { dir: "/a".into(), bytes: Some(4 * GIB) }));
    assert!(pool("/a:b").unwrap_err().contains("/a:b"), "a mistyped size makes no directory");
    assert_eq!(pool("/a:b/"), Ok(PoolConfig { dir: "/a:b/".into(), bytes: None }));
    assert_eq!(pool("/a:1/b"), Ok(PoolConfig { dir: "/a:1/b".into(), bytes: None }));
    assert!(pool("/a:4parsecs").is_err() && pool(":4GiB").is_err() && pool("").is_err());
}
