use clap::{CommandFactory as _, FromArgMatches as _};

use slipgate_broker::config::Mode as UserMode;

use super::*;
use crate::{
    args::{Command, CommandLine, Mode},
    config::rule_flags,
};

fn config(words: &[&str]) -> Result<RunConfig, String> {
    let words = ["slipgate", "run"].iter().chain(words);
    let matches = CommandLine::command()
        .try_get_matches_from(words)
        .map_err(|e| e.to_string())?;
    let typed = CommandLine::from_arg_matches(&matches).map_err(|e| e.to_string())?;
    let Command::Run(args) = typed.command else {
        panic!("not run");
    };
    let order = matches.subcommand_matches("run").expect("run");
    let is_userspace = args.nat.mode == Mode::Userspace;
    super::run(&args, is_userspace, rule_flags(order)).map_err(|e| e.to_string())
}

#[track_caller]
fn refused(words: &[&str], parts: &[&str]) {
    let error = config(words).expect_err("refused");
    for part in parts {
        assert!(
            error.contains(part),
            "{words:?} says {error:?}, not {part:?}"
        );
    }
}

#[test]
fn nothing_said_is_a_small_machine_that_tests_itself() {
    let c = config(&[]).unwrap();
    let m = &c.machine;
    assert_eq!((m.cpus, m.queues, m.memory_mib), (1, 1, 512));
    assert_eq!((m.kernel.as_ref(), m.cmdline.as_str()), (None, "selftest"));
    assert_eq!(m.tap, "sgvm%d");
    // Its MAC is known, but the guest may take another.
    assert_eq!(c.nat.vms[0].mac, None);
    assert_eq!(c.nat.on_exit, OnExit::Detach);
}

#[test]
fn queues_follow_cpus_unless_told() {
    let queues = |words: &[&str]| config(words).unwrap().machine.queues;
    assert_eq!(queues(&["--cpus", "4"]), 4);
    assert_eq!(queues(&["--cpus", "32"]), 16);
    assert_eq!(queues(&["--cpus", "4", "--queues", "2"]), 2);
}

#[test]
fn the_vm_is_called_as_its_tap_unless_it_has_a_name() {
    let mut c = config(&[]).unwrap();
    c.set_tap("sgvm7");
    assert_eq!(c.nat.vms[0].name, "sgvm7");
    assert_eq!(
        (c.nat.vms[0].tap.as_str(), c.machine.tap.as_str()),
        ("sgvm7", "sgvm7")
    );
    let mut c = config(&["--name", "a", "--tap", "t"]).unwrap();
    assert_eq!(c.nat.vms[0].tap, "t");
    c.set_tap("t");
    assert_eq!(c.nat.vms[0].name, "a");
}

#[test]
fn a_mac_that_is_given_is_enforced() {
    let c = config(&["--mac", "52:54:00:12:34:56"]).unwrap();
    assert_eq!(c.machine.mac, [0x52, 0x54, 0, 0x12, 0x34, 0x56]);
    assert_eq!(c.nat.vms[0].mac, Some(c.machine.mac));
    refused(
        &["--mac", "01:00:00:00:00:01"],
        &["--mac 01:", "not the MAC of one device"],
    );
}

#[test]
fn a_kernel_has_its_own_command_line() {
    let of = |words: &[&str]| config(words).unwrap().machine.cmdline;
    assert_eq!(of(&["--kernel", "k"]), "console=ttyS0 panic=-1");
    assert_eq!(of(&["--kernel", "k", "--cmdline", ""]), "");
    refused(
        &["--cmdline", " "],
        &["--cmdline", "nothing to do", "selftest"],
    );
    refused(&["--cmdline", "a\nb"], &["'\\n' is not printable ASCII"]);
    refused(
        &["--cmdline", &"x".repeat(2_048)],
        &["2048 bytes", "2047 at most"],
    );
    refused(&["--initrd", "i"], &["--initrd i", "built-in", "--kernel"]);
}

#[test]
fn what_is_out_of_range_says_what_would_do() {
    refused(&["--cpus", "0"], &["--cpus 0", "at least 1", "give 1"]);
    refused(
        &["--cpus", "33"],
        &["--cpus 33", "32 is the most", "give 32"],
    );
    refused(&["--queues", "17"], &["--queues 17", "give 16"]);
    refused(&["--memory", "31"], &["--memory 31", "at least 32"]);
    refused(&["--cpus", "two"], &["two", "give a whole number, like 2"]);
    refused(&["--cpus", "-1"], &["-1", "give a whole number, like 2"]);
    refused(&["--queues", "1.5"], &["give a whole number"]);
    for text in ["1T", "G", "-5", "1.5G", "99999999999999999G", ""] {
        refused(&["--memory", text], &["give MiB, like 1024", "1G"]);
    }
    for (text, mib) in [("1G", 1_024), ("64m", 64), ("2GiB", 2_048), ("100MiB", 100)] {
        let given = config(&["--memory", text]).unwrap().machine.memory_mib;
        assert_eq!(given, mib, "{text}");
    }
    refused(&["--memory", "524289"], &["524288 is the most"]);
    refused(
        &["--tap", "a/b"],
        &["--tap a/b", "can't be a network device"],
    );
    refused(&["--tap", "t%d"], &["--tap t%d", "leave --tap out"]);
    refused(&["--tap", "sgport0"], &["--tap sgport0", "own devices"]);
    refused(&["--tap", "überTAP"], &["--tap überTAP", "can't be a name"]);
    refused(&["--name", "a b"], &["--name a b", "can't be a name"]);
}

#[test]
fn nat_flags_are_those_of_attach() {
    let c = config(&[
        "--deny",
        "203.0.113.0/24",
        "--forward",
        "tcp:8080:80",
        "--name",
        "v",
    ])
    .unwrap();
    assert_eq!((c.nat.flags.rules.len(), c.nat.forwards.len()), (1, 1));
    refused(
        &["--forward", "zz=tcp:8080:80"],
        &["no VM \"zz\"", "leave zz= out"],
    );
    refused(
        &["--forward", "tcp:1:80", "--forward", "tcp:1:81"],
        &["port 1 leads to port 80 of the guest already"],
    );
    refused(&["--guest-ip", "10.0.2.2"], &["--guest-ip"]);
    refused(
        &["--uplink", "t0", "--tap", "t0"],
        &["--uplink t0", "it is the TAP"],
    );
}

#[test]
fn in_user_mode_there_is_no_tap_and_one_queue_pair() {
    let user_mode = |words: &[&str]| config(&[&["--mode", "userspace"], words].concat());
    let c = user_mode(&["--cpus", "4", "--mac", "02:00:00:00:00:09"]).unwrap();
    assert_eq!((c.machine.cpus, c.machine.queues), (4, 1));
    assert_eq!(
        (c.nat.mode, c.machine.tap.as_str()),
        (UserMode::Userspace, "")
    );
    let vm = &c.nat.vms[0];
    assert_eq!(vm.name, format!("run-{}", std::process::id()));
    assert_eq!(vm.mac, Some([2, 0, 0, 0, 0, 9]));
    let c = user_mode(&["--name", "web", "--queues", "1"]).unwrap();
    assert_eq!((c.nat.vms[0].name.as_str(), c.machine.queues), ("web", 1));
    let c = user_mode(&["--forward", "tcp:8080:80", "--metrics", "127.0.0.1:9600"]).unwrap();
    let forward = &c.nat.forwards[0];
    assert_eq!((forward.host_port, forward.guest_port), (8_080, 80));
    assert_eq!(c.nat.metrics.map(|at| at.port()), Some(9_600));
    let refused = |words: &[&str], parts: &[&str]| {
        refused(&[&["--mode", "userspace"], words].concat(), parts);
    };
    refused(&["--tap", "tap0"], &["--tap tap0", "no TAP"]);
    refused(&["--queues", "2"], &["--queues 2", "leave it out"]);
    refused(&["--queues", "0"], &["--queues 0", "at least 1"]);
    refused(&["--forward", "b=tcp:80:80"], &["--forward b=tcp:80:80"]);
    refused(&["--metrics", "127.0.0.1:0"], &["nobody would know"]);
    refused(&["--xdp", "on"], &["--xdp on"]);
    refused(&["--name", "a b"], &["--name"]);
}

/// A snapshot's directory, with the description of a machine.
fn described(change: impl FnOnce(&mut MachineSpec)) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut machine = config(&[]).unwrap().machine;
    change(&mut machine);
    let text = serde_json::to_string(&SavedMachine::of(&machine)).unwrap();
    let file = dir.path().join("machine.json");
    std::fs::write(&file, text).unwrap();
    set_mode(&file, 0o600);
    dir
}

fn set_mode(path: &Path, mode: u32) {
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

fn disk(_: usize) -> DiskSpec {
    DiskSpec {
        path: "/disk".into(),
        read_only: false,
        cache: slipgate_ipc::vmm::DiskCache::default(),
        rate: slipgate_ipc::vmm::RateLimit::default(),
    }
}

#[test]
fn a_restored_machine_is_one_that_could_be_booted() {
    let most = described(|machine| {
        machine.disks = (0..MAX_DISKS).map(disk).collect();
        machine.vsock = Some(VsockSpec {
            cid: 3,
            socket: "/socket".into(),
        });
    });
    let at = |dir: &tempfile::TempDir| dir.path().display().to_string();
    let machine = config(&["--restore", &at(&most)]).unwrap().machine;
    assert_eq!(machine.disks.len(), MAX_DISKS);
    let beyond = described(|machine| machine.disks = (0..=MAX_DISKS).map(disk).collect());
    let again = "slipgate snapshot";
    refused(&["--restore", &at(&beyond)], &["9 disks", again]);
    for cid in [0, 1, 2, u32::MAX] {
        let nobody = described(|machine| {
            machine.vsock = Some(VsockSpec {
                cid,
                socket: "/socket".into(),
            });
        });
        let named = cid.to_string();
        refused(
            &["--restore", &at(&nobody)],
            &[&named, "not a guest's", again],
        );
    }
}

#[test]
fn a_snapshot_that_others_can_have_written_is_refused() {
    let dir = described(|_| {});
    let at = dir.path().display().to_string();
    config(&["--restore", &at]).unwrap();
    set_mode(dir.path(), 0o777);
    refused(&["--restore", &at], &["(mode 0777)", "chown", "chmod"]);
    set_mode(dir.path(), 0o755);
    set_mode(&dir.path().join("machine.json"), 0o620);
    refused(&["--restore", &at], &["machine.json", "(mode 0620)"]);
}
