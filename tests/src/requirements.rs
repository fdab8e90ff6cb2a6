//! Requirements of a test on the machine, and the report that a test can't run.

use std::{fs::File, io::Write};

/// Prints `skipped: TEST: WHY`. With `SLIPGATE_NO_SKIP` set, as CI has it, a skip is a failure.
#[macro_export]
macro_rules! skipped {
    ($($why:tt)+) => {
        $crate::requirements::say_skipped(&format!($($why)+))
    };
}

/// Returns from a test, saying why, on a machine without root or `/dev/net/tun`. A test that
/// returns something other than `()` gives the value: `require_root_and_tun!(Ok(()))`.
#[macro_export]
macro_rules! require_root_and_tun {
    () => {
        $crate::require_root_and_tun!(())
    };
    ($value:expr) => {
        if let Err(why) = $crate::requirements::root_and_tun() {
            $crate::skipped!("{why}");
            return $value;
        }
    };
}

/// Returns from a test, saying why, on a machine without a usable `/dev/kvm`.
#[macro_export]
macro_rules! require_kvm {
    () => {
        if let Err(why) = $crate::requirements::kvm() {
            $crate::skipped!("{why}");
            return;
        }
    };
}

/// Prints `left out: TEST: WHY`, of a test of another project's program that nobody named, or of what
/// the host was started, or its kernel built, without (a controller of cgroup v2, VRFs). Unlike a skip
/// it is no failure anywhere: no distribution has the program, and no package brings the others.
#[macro_export]
macro_rules! left_out {
    ($($why:tt)+) => {
        $crate::requirements::say_left_out(&format!($($why)+))
    };
}

/// Prints the message of `skipped!`, with the test's name.
pub fn say_skipped(why: &str) {
    let line = about_this_test("skipped", why);
    assert!(std::env::var_os("SLIPGATE_NO_SKIP").is_none(), "{line}");
    say(&line);
}

/// Prints the message of `left_out!`, with the test's name.
pub fn say_left_out(why: &str) {
    say(&about_this_test("left out", why));
}

fn about_this_test(what: &str, why: &str) -> String {
    let thread = std::thread::current();
    format!("{what}: {}: {why}", thread.name().unwrap_or("?"))
}

fn say(line: &str) {
    // Not `println!`: libtest shows what that prints of failed tests only.
    writeln!(std::io::stderr(), "{line}").ok();
}

/// Checks that this process may make namespaces and TAPs.
///
/// # Errors
/// It may not; the text says why.
pub fn root_and_tun() -> Result<(), String> {
    // SAFETY: geteuid takes nothing and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        return Err("it needs root (network namespaces, TAPs)".into());
    }
    let opened = File::options().read(true).write(true).open("/dev/net/tun");
    opened
        .map(drop)
        .map_err(|error| format!("it needs /dev/net/tun: {error}"))
}

/// Checks that this process may make network namespaces, which a user without root can in a user
/// namespace of their own.
///
/// # Errors
/// It may not; the text says why.
pub fn networks() -> Result<(), String> {
    // SAFETY: unshare takes flags only and concerns this thread, which ends.
    let made = std::thread::spawn(|| match unsafe { libc::unshare(libc::CLONE_NEWNET) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    });
    let made = made.join().expect("the thread does not panic");
    made.map_err(|error| {
        format!(
            "it can't make network namespaces: {error}; it needs root, or a user and a network namespace of \
             its own (unshare --user --map-current-user --keep-caps --net)"
        )
    })
}

/// Checks that this process may make virtual machines.
///
/// # Errors
/// It may not; the text says why.
pub fn kvm() -> Result<(), String> {
    let opened = File::options().read(true).write(true).open("/dev/kvm");
    opened
        .map(drop)
        .map_err(|error| format!("it needs /dev/kvm: {error}"))
}
