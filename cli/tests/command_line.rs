//! Output of the binary about itself, and when nothing is attached.
use std::process::{Command, Output};

fn slipgate(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_slipgate"));
    command.args(args).output().expect("the built binary runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn help_lists_what_there_is_and_hides_engine_and_vmm() {
    let help = text(&slipgate(&["--help"]).stdout);
    for (command, what) in [
        (
            "attach",
            "Give one or more TAP devices, or the guest of a socket, a network, until stopped",
        ),
        ("run", "Boot a microVM with a network of its own"),
        ("flows", "List live flows"),
        ("stats", "Show packets, bytes, drops, refusals and ports"),
        (
            "why",
            "Say which rule decides about a destination, and what would happen",
        ),
        ("doctor", "Say what this machine lacks, and how to get it"),
    ] {
        let is_said = |line: &str| {
            let said = line.trim().split_once(' ');
            said.is_some_and(|(name, said)| name == command && said.trim() == what)
        };
        assert!(
            help.lines().any(is_said),
            "{help}\n  lacks {command}: {what}"
        );
    }
    assert!(!help.contains("engine process"), "{help}");
    assert!(!help.contains("VMM process"), "{help}");
    let run = text(&slipgate(&["run", "--help"]).stdout);
    for flag in [
        "--kernel <FILE>",
        "--initrd <FILE>",
        "--disk <FILE[,ro][,cache=MODE][,iops=N][,bandwidth=BYTES]>",
        "--vsock <CID,SOCKET>",
        "--cmdline <TEXT>",
        "--cpus <N>",
        "--memory <MIB>",
        "--queues <N>",
        "--tap <IF>",
        "--name <NAME>",
        "--mac <MAC>",
        "--report <FILE>",
        "--mode <MODE>",
        "--forward <SPEC>",
        "121      the guest crashed",
    ] {
        assert!(run.contains(flag), "{run}\n  lacks {flag:?}");
    }
    let help = text(&slipgate(&["attach", "--help"]).stdout);
    for flag in [
        "--vm <SPEC>",
        "--tap <IF>",
        "--mode <MODE>",
        "--uplink <IF>",
        "--guest-ip <A>",
        "--gateway <A>",
        "--prefix <N>",
        "--mtu <N>",
        "--dns <A[:P]|none>",
        "--default <DEFAULT>",
        "--allow <RULE>",
        "--deny <RULE>",
        "--deny-file <F>",
        "--max-flows <N>",
        "--new-flows-per-second <N>",
        "--forward <SPEC>",
        "--nat-ports <A-B>",
        "--eim-ports <A-B>",
        "--flow-table <N>",
        "--max-vms <N>",
        "--max-rules <N>",
        "--pin-dir <DIR>",
        "--flow-log <FILE>",
        "--flow-log-events <EVENTS>",
        "--metrics <ADDR:PORT>",
        "--xdp <XDP>",
        "--bpf-log",
        "--log <LEVEL>",
        "--on-exit <ON_EXIT>",
    ] {
        assert!(help.contains(flag), "{help}\n  lacks {flag:?}");
    }
}

#[test]
fn a_bad_value_is_a_usage_error_that_says_what_would_do() {
    let output = slipgate(&["attach", "--tap", "tap0", "--guest-ip", "10.0.2"]);
    assert_eq!(output.status.code(), Some(2));
    let said = text(&output.stderr);
    assert_eq!(
        said.trim_end(),
        "slipgate: --guest-ip 10.0.2: not an IPv4 address; give four numbers like 10.0.2.15"
    );
    let output = slipgate(&["attach", "--tap", "t", "--mode", "userspace"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("only `slipgate run`"));
}

#[test]
fn user_mode_has_endpoint_independent_mapping_for_udp_and_with_ports() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let path = file.path().to_str().expect("a path");
    for (protocol, flags, part) in [
        ("udp", &[][..], "--eim-ports"),
        ("tcp", &["--eim-ports", "20000-20999"][..], "for UDP only"),
    ] {
        let policy =
            format!("default = \"allow\"\n[nat.{protocol}]\nmapping = \"endpoint-independent\"\n");
        std::fs::write(file.path(), policy).expect("it is written");
        let args = [&["exec", "--policy", path][..], flags, &["--", "true"]].concat();
        let output = slipgate(&args);
        assert_ne!(output.status.code(), Some(0));
        let said = text(&output.stderr);
        assert!(said.contains(part), "{protocol}: {said}");
    }
}

#[test]
fn readers_say_that_nothing_is_attached() {
    let pins = "/sys/fs/bpf/slipgate-nobody-made-this";
    for args in [
        &["flows", "--pin-dir", pins][..],
        &["stats", "--json", "--pin-dir", pins],
        &["why", "a", "192.0.2.1:80", "--pin-dir", pins],
    ] {
        let output = slipgate(args);
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        let said = text(&output.stderr);
        assert!(said.contains("slipgate attach"), "{args:?}: {said}");
    }
}

#[test]
fn an_engine_is_not_for_people() {
    let output = slipgate(&["engine", "--fd", "999", "--user", "65534"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("slipgate starts these by itself"));
}

#[test]
fn doctor_reports_in_words_and_in_json() {
    let output = slipgate(&["doctor", "--uplink", "lo", "--json"]);
    let findings: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let missing = findings
        .as_array()
        .expect("an array")
        .iter()
        .any(|f| f["state"] == "missing");
    assert_eq!(output.status.code(), Some(i32::from(missing)));
    let words = text(&slipgate(&["doctor", "--uplink", "lo"]).stdout);
    assert!(
        words.contains("capabilities") && words.contains("uplink"),
        "{words}"
    );
}
