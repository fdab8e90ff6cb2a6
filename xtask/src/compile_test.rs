//! The build scripts that embed what xtask builds, in a checkout where nothing is built.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use tempfile::TempDir;

/// A crate's build script, what it embeds, and where from.
const SCRIPTS: [(&str, &[&str], &str, &str); 2] = [
    (
        "ebpf/control",
        &["slipgate.o", "slipgate-log.o"],
        "target/bpf",
        "SLIPGATE_BPF_DIR",
    ),
    (
        "cli",
        &["slipgate-guest"],
        "target/guest",
        "SLIPGATE_GUEST_DIR",
    ),
];

/// A checkout of one crate.
struct Checkout {
    root: TempDir,
    package: &'static str,
    script: PathBuf,
}

impl Checkout {
    fn new(package: &'static str) -> Self {
        let root = tempfile::tempdir().unwrap();
        let ours = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("..")
            .join(package);
        let script = root.path().join("build-script");
        let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
        let compiled = Command::new(rustc)
            .args(["--edition=2024", "-o"])
            .arg(&script)
            .arg(ours.join("build.rs"))
            .status();
        assert!(compiled.unwrap().success());
        for folder in [root.path().join(package), root.path().join("out")] {
            fs::create_dir_all(folder).unwrap();
        }
        Self {
            root,
            package,
            script,
        }
    }

    /// Runs the build script; returns its instructions to cargo.
    fn build(&self, profile: &str, variables: &[(&str, &Path)]) -> String {
        let output = Command::new(&self.script)
            .env_clear()
            .env("CARGO_MANIFEST_DIR", self.root.path().join(self.package))
            .env("OUT_DIR", self.out())
            .env("PROFILE", profile)
            .envs(variables.iter().copied())
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn out(&self) -> PathBuf {
        self.root.path().join("out")
    }
}

#[test]
fn a_fresh_clone_compiles_with_stubs_and_a_warning() {
    for (package, embedded, folder, _) in SCRIPTS {
        let checkout = Checkout::new(package);
        let told = checkout.build("debug", &[]);
        assert!(!told.contains("cargo:error"), "{told}");
        assert_eq!(told.matches("cargo:warning").count(), embedded.len());
        assert!(told.contains("`cargo xtask build --"), "{told}");
        // Else cargo would compile it anew each time.
        for path in told
            .lines()
            .filter_map(|l| l.strip_prefix("cargo:rerun-if-changed="))
        {
            assert!(Path::new(path).is_dir(), "{path}");
        }
        for name in embedded {
            assert_eq!(fs::read(checkout.out().join(name)).unwrap(), b"");
        }
        // What is built later takes the stub's place.
        for name in embedded {
            fs::write(checkout.root.path().join(folder).join(name), "real").unwrap();
        }
        let told = checkout.build("debug", &[]);
        assert!(!told.contains("cargo:warning"), "{told}");
        for name in embedded {
            assert_eq!(fs::read(checkout.out().join(name)).unwrap(), b"real");
        }
    }
}

#[test]
fn releases_and_builds_by_xtask_have_no_stub() {
    for (package, embedded, folder, variable) in SCRIPTS {
        let checkout = Checkout::new(package);
        let elsewhere = checkout.root.path().join("elsewhere");
        for (profile, variables) in [
            ("release", &[][..]),
            ("debug", &[("SLIPGATE_NO_STUBS", Path::new("1"))]),
            // Who says where it is expects it there.
            ("debug", &[(variable, &elsewhere)]),
        ] {
            let told = checkout.build(profile, variables);
            assert_eq!(
                told.matches("cargo:error").count(),
                embedded.len(),
                "{told}"
            );
            assert!(told.contains("`cargo xtask build --"), "{told}");
            for name in embedded {
                assert!(!checkout.out().join(name).exists(), "{profile}");
            }
        }
        let built = checkout.root.path().join(folder);
        fs::create_dir_all(&built).unwrap();
        for name in embedded {
            fs::write(built.join(name), "real").unwrap();
        }
        let told = checkout.build("release", &[("SLIPGATE_NO_STUBS", Path::new("1"))]);
        assert!(!told.contains("cargo:error"), "{told}");
    }
}

#[test]
fn only_the_logging_object_can_be_waived() {
    let checkout = Checkout::new("ebpf/control");
    let told = checkout.build(
        "release",
        &[
            ("SLIPGATE_NO_STUBS", Path::new("1")),
            ("SLIPGATE_NO_BPF_LOG", Path::new("1")),
        ],
    );
    assert_eq!(told.matches("cargo:error").count(), 1, "{told}");
    assert!(!told.contains("cargo:warning"), "{told}");
    assert!(!checkout.out().join("slipgate.o").exists());
    let logging = checkout.out().join("slipgate-log.o");
    assert_eq!(fs::read(&logging).unwrap(), b"");
    // One that is there is embedded all the same.
    let built = checkout.root.path().join("target/bpf");
    fs::write(built.join("slipgate-log.o"), "real").unwrap();
    checkout.build("quick", &[("SLIPGATE_NO_BPF_LOG", Path::new("1"))]);
    assert_eq!(fs::read(&logging).unwrap(), b"real");
}

#[test]
fn cargo_is_started_without_stubs() {
    let workspace = crate::workspace::Workspace::find().unwrap();
    let cargo = workspace.cargo();
    let mut set = cargo.get_envs();
    assert!(set.any(|(name, value)| name == "SLIPGATE_NO_STUBS" && value.is_some()));
}
