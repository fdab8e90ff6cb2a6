//! `cargo xtask run --mode userspace`, as a user without any privilege: they make the demonstration's
//! network in namespaces of their own.
//!
//! xtask is the real one, in a checkout without sources, where cargo has nothing to build. What it would
//! call as sudo writes down that it was called.

use std::{
    env,
    fs::{self, File, Permissions},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use slipgate_testbed::{NetNs, OrdinaryUser, require_kvm, require_root_and_tun, skipped, slipgate};

/// The demonstration takes seconds, on a machine that does nothing else.
const WITHIN: Duration = Duration::from_secs(180);
/// Who makes the inner namespaces of the user is refused more.
const NO_NAMESPACES: &str = "echo 0 > /proc/sys/user/max_user_namespaces && \
    exec setpriv --inh-caps=-all --ambient-caps=-all --bounding-set=-all -- \"$@\"";

/// A user with a checkout, in which everything is built.
struct Checkout {
    user: OrdinaryUser,
    network: NetNs,
}

impl Checkout {
    /// `None` where nobody says which xtask to test.
    fn new() -> Option<Self> {
        let xtask = PathBuf::from(env::var_os("SLIPGATE_XTASK")?);
        let user = OrdinaryUser::new().unwrap();
        for dir in ["checkout/ebpf/programs", "target/quick", "bin"] {
            fs::create_dir_all(user.file(dir)).unwrap();
        }
        fs::write(user.file("checkout/ebpf/programs/Cargo.toml"), "").unwrap();
        user.install(&xtask, "xtask").unwrap();
        let demo = PathBuf::from(env!("CARGO_BIN_EXE_slipgate-demo"));
        let built = [
            (slipgate::binary().unwrap(), "slipgate"),
            (demo, "slipgate-demo"),
        ];
        for (program, name) in built {
            let to = format!("target/quick/{name}");
            user.install(&program, &to).unwrap();
        }
        let sudo = user.file("bin/sudo");
        let asked = user.file("run/sudo");
        fs::write(
            &sudo,
            format!("#!/bin/sh\necho \"$@\" > {}\n", asked.display()),
        )
        .unwrap();
        fs::set_permissions(&sudo, Permissions::from_mode(0o755)).unwrap();
        let network = NetNs::new("checkout").unwrap();
        Some(Self { user, network })
    }

    /// The command behind further ones, as [`OrdinaryUser::command`] takes it.
    fn words(&self, around: &[&str]) -> Vec<String> {
        let xtask = self.user.file("xtask").display().to_string();
        let around = around.iter().copied().chain([xtask.as_str()]);
        let words = ["run", "--mode", "userspace", "--no-setup"];
        around.chain(words).map(str::to_owned).collect()
    }

    /// Runs it to its end: what it exits with, and what it wrote. It is killed when it takes too long.
    fn run(&self, mut command: Command) -> (Option<i32>, String) {
        let written = self.user.file("output");
        let output = File::create(&written).unwrap();
        let path = env::var("PATH").unwrap_or_default();
        command
            .env(
                "PATH",
                format!("{}:{path}", self.user.file("bin").display()),
            )
            .env("CARGO", "true")
            .env("CARGO_MANIFEST_DIR", self.user.file("checkout/xtask"))
            .env("CARGO_TARGET_DIR", self.user.file("target"))
            .stdout(output.try_clone().unwrap())
            .stderr(output);
        let mut child = self.network.spawn(command).unwrap();
        let until = Instant::now() + WITHIN;
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status.code();
            }
            if Instant::now() > until {
                child.kill().unwrap();
                child.wait().unwrap();
                break None;
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        (status, fs::read_to_string(written).unwrap())
    }

    /// What sudo was called with.
    fn asked_sudo(&self) -> Option<String> {
        fs::read_to_string(self.user.file("run/sudo")).ok()
    }
}

#[test]
fn the_demonstration_of_user_mode_asks_for_no_root() {
    require_root_and_tun!();
    require_kvm!();
    let Some(checkout) = Checkout::new() else {
        skipped!("SLIPGATE_XTASK names no xtask, as `cargo xtask test` does");
        return;
    };
    let words = checkout.words(&[]);
    let command = checkout
        .user
        .command_with_kvm(Path::new(&words[0]), &words[1..]);
    let (status, said) = checkout.run(command);
    assert_eq!((status, checkout.asked_sudo()), (Some(0), None), "{said}");
    for part in [
        "slipgate without root",
        "`slipgate why` names the rule",
        "Flows at a moment in the upload",
        "both streams down came whole",
        "nothing is left",
    ] {
        assert!(said.contains(part), "it says not {part:?}: {said}");
    }
}

#[test]
fn a_user_who_is_refused_what_the_demonstration_takes_is_told_why_sudo_is_asked() {
    require_root_and_tun!();
    require_kvm!();
    let Some(checkout) = Checkout::new() else {
        skipped!("SLIPGATE_XTASK names no xtask, as `cargo xtask test` does");
        return;
    };
    let user = &checkout.user;
    let inner = "unshare --user --map-current-user --keep-caps bash -c";
    let inner: Vec<&str> = inner.split(' ').chain([NO_NAMESPACES, "bash"]).collect();
    let words = checkout.words(&inner);
    let without_namespaces = user.command_with_kvm(Path::new(&words[0]), &words[1..]);
    let words = checkout.words(&[]);
    let without_kvm = user.command(Path::new(&words[0]), &words[1..]);
    let demo = user.file("target/quick/slipgate-demo");
    let wanted = format!("--preserve-env -- {} --mode userspace\n", demo.display());
    for (command, why) in [
        (without_namespaces, "user.max_user_namespaces is 0"),
        (without_kvm, "this user may not open /dev/kvm"),
    ] {
        let (status, said) = checkout.run(command);
        assert_eq!(status, Some(0), "{said}");
        assert_eq!(checkout.asked_sudo().as_ref(), Some(&wanted), "{said}");
        assert!(said.contains(why), "{said}");
        fs::remove_file(user.file("run/sudo")).unwrap();
    }
}
