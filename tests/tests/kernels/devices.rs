//! End-to-end tests of devices that the kernel under a test need not have: VRFs, VLANs, WireGuard. The
//! end-to-end tests' own binary runs on a kernel that has them all.

use std::{
    env,
    path::PathBuf,
    process::{Command, Stdio},
};

use serde_json::Value;
use slipgate_testbed::{
    rig::{COMMAND, DEVICE_MODULES, DEVICE_TESTS, Hardware, Initramfs, Kernel, Machine, on_path},
    skipped, slipgate,
};

use super::{MODULES, TIMEOUT};

/// A part of the names of those that are to run; all by default.
const WANTED: &str = "SLIPGATE_DEVICE_TESTS";
/// Path of the end-to-end tests' binary.
const E2E_TESTS: &str = "SLIPGATE_E2E_TESTS";
/// Programs that these tests start.
const TOOLS: [&str; 4] = ["ip", "tc", "curl", "wg"];
/// Names that `ip rule` takes.
const PROTOCOLS: &[u8] = b"tcp 6 TCP\nudp 17 UDP\n";

#[test]
fn end_to_end_with_vrfs_vlans_and_wireguard_on_6_1() {
    works_on("6.1", "hybrid_ipv6");
}

#[test]
fn end_to_end_with_vrfs_vlans_and_wireguard_on_6_12() {
    works_on("6.12", "hybrid_ipv4");
}

/// A start of slipgate takes the emulated CPU some ten seconds, so each kernel has one `cell` of each test,
/// and both together have all of hybrid mode's.
fn works_on(series: &str, cell: &str) {
    let _turn = slipgate_testbed::turns::alone("QEMU without KVM keeps each CPU busy");
    let found = Machine::is_possible().and_then(|()| Kernel::find(series));
    let kernel = match found {
        Ok(kernel) => kernel,
        Err(why) => return skipped!("{why}"),
    };
    let tools: Result<Vec<_>, _> = TOOLS.iter().map(|tool| on_path(tool)).collect();
    let tools = match tools {
        Ok(tools) => tools,
        Err(why) => return skipped!("{why}"),
    };
    let Some(tests) = e2e() else {
        return skipped!(
            "the end-to-end tests' binary is not known: set {E2E_TESTS}, or start these by cargo"
        );
    };
    let mut initramfs = Initramfs::new(env!("CARGO_BIN_EXE_slipgate-rig-init").as_ref()).unwrap();
    let modules = [&MODULES[..], &DEVICE_MODULES].concat();
    initramfs.modules(&kernel, &modules).unwrap();
    for tool in &tools {
        initramfs.program(tool).unwrap();
    }
    let binary = slipgate::binary().unwrap();
    initramfs.program_as("slipgate", &binary).unwrap();
    initramfs.program_as("e2e", &tests).unwrap();
    initramfs.file("/etc/protocols", PROTOCOLS);
    let cells = DEVICE_TESTS.iter().map(|body| format!("{body}::{cell}"));
    let wanted = env::var(WANTED).unwrap_or_default();
    let names: Vec<_> = cells.filter(|name| name.contains(&wanted)).collect();
    let command = format!("/bin/e2e --exact --test-threads=1 {}", names.join(" "));
    initramfs.file(COMMAND, command.as_bytes());

    let machine = Machine {
        kernel: &kernel,
        initramfs: &initramfs.finish(),
        parameters: "",
        // Each test has a start of slipgate of its own, whose programs the verifier looks at.
        timeout: 2 * TIMEOUT,
        hardware: Hardware::default(),
    };
    let ended = machine.run().unwrap();
    println!("{}", ended.report);
    println!("{}: {:.1} s", kernel.release(), ended.took.as_secs_f64());
    let passed = format!("test result: ok. {} passed; 0 failed;", names.len());
    let is_whole = ended.report.contains(&passed)
        && !["left out: ", "skipped: "]
            .iter()
            .any(|said| ended.report.contains(said));
    assert!(
        ended.well && is_whole,
        "{}: {}; the report:\n{}\nthe console:\n{}",
        kernel.release(),
        ended.how,
        ended.report,
        ended.console
    );
}

/// The end-to-end tests' binary of this build: the one that `cargo xtask test` names, else the one that
/// cargo does, which set `CARGO`.
fn e2e() -> Option<PathBuf> {
    if let Some(path) = env::var_os(E2E_TESTS) {
        return Some(path.into());
    }
    let mut build = Command::new(env::var_os("CARGO")?);
    build.args([
        "test",
        "--package=slipgate-testbed",
        "--test=e2e",
        "--no-run",
        "--message-format=json-render-diagnostics",
    ]);
    if !cfg!(debug_assertions) {
        build.arg("--release");
    }
    build.current_dir(env!("CARGO_MANIFEST_DIR"));
    let output = build.stderr(Stdio::inherit()).output().ok()?;
    let messages = String::from_utf8(output.stdout).ok()?;
    let executable = |line: &str| {
        let message: Value = serde_json::from_str(line).ok()?;
        let is_it = message["target"]["name"] == "e2e" && message["profile"]["test"] == true;
        is_it.then(|| message["executable"].as_str().map(PathBuf::from))?
    };
    messages.lines().find_map(executable)
}
