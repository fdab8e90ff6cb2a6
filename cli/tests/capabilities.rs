//! The broker's operations while it serves, with one of its capabilities missing each time: each is
//! needed, and the broker has no other. A capability that is not in the bounding set when slipgate
//! starts is never available to it.
use std::{
    fs,
    os::unix::fs::{PermissionsExt, chown},
    path::Path,
    time::{Duration, Instant},
};

use slipgate_testbed::{
    Guest, GuestConfig, PinDir, Result, Slipgate, World,
    clients::icmp,
    require_root_and_tun, signal,
    slipgate::Start,
    world::{SERVER, UPLINK},
};

/// Capabilities by their numbers in <linux/capability.h>.
const DAC_OVERRIDE: u8 = 1;
const KILL: u8 = 5;
const SETGID: u8 = 6;
const SETUID: u8 = 7;
const SETPCAP: u8 = 8;
const NET_ADMIN: u8 = 12;
/// Time limit for operations that take some milliseconds. A missing operation takes this long.
const WAIT: Duration = Duration::from_secs(3);
const NOBODY: u32 = 65_534;
const METRICS: &str = "127.0.0.1:9600";

/// Stages of the broker's work that can be observed from outside.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Task {
    /// Start slipgate, and serve a guest.
    Serve,
    /// A TAP that goes and comes again has its program again.
    ServeTapAgain,
    /// SIGHUP opens the flow log again, in a folder that is another user's.
    OpenLogAgain,
    /// An engine that ended has a successor, which can come by no capability.
    ReplaceEngine,
    /// Stop slipgate together with a child process that does not respond.
    EndStoppedChild,
}

use Task::*;

#[test]
fn the_broker_keeps_what_it_needs_and_nothing_else() {
    require_root_and_tun!();
    let needed: [(u8, Task); 6] = [
        (DAC_OVERRIDE, OpenLogAgain),
        (KILL, EndStoppedChild),
        // Without these there is no process of another user's, and no port: not even a start.
        (SETGID, Serve),
        (SETUID, Serve),
        (SETPCAP, ReplaceEngine),
        (NET_ADMIN, Serve),
    ];
    let (kept, failed) = what_fails(None).unwrap();
    assert_eq!(failed, []);
    let all_needed = needed.iter().fold(0, |set, (number, _)| set | 1 << number);
    assert_eq!(kept, Some(all_needed), "kept, and missed where it is not");
    let failed = needed.map(|(number, _)| (number, what_fails(Some(number)).unwrap().1));
    assert_eq!(failed, needed.map(|(number, task)| (number, vec![task])));
}

/// Returns the broker's capabilities once it serves, if it does, and the operations that fail then.
fn what_fails(without_capability: Option<u8>) -> Result<(Option<u64>, Vec<Task>)> {
    let world = World::new()?;
    let mut guest = Guest::new(&world, GuestConfig::new("tap0"))?;
    let folder = tempfile::tempdir().expect("a folder");
    let log = folder.path().join("flows.jsonl");
    let log_path = log.display().to_string();
    let args = [
        "--tap",
        "tap0",
        "--uplink",
        UPLINK,
        "--flow-log",
        &log_path,
        "--metrics",
        METRICS,
    ];
    let start = Start {
        binary: Some(env!("CARGO_BIN_EXE_slipgate").into()),
        without_capability,
        ..Start::default()
    };
    let attached = Slipgate::attach_as(&start, &world.host, &PinDir::new()?, &args);
    let Ok(mut slipgate) = attached else {
        return Ok((None, vec![Serve]));
    };
    let kept = capabilities(slipgate.broker_pid());
    let mut failed = Vec::new();
    let mut note = |task, done: bool| failed.extend((!done).then_some(task));
    note(Serve, is_served(&guest));
    note(
        OpenLogAgain,
        opens_log_again(&slipgate, folder.path(), &log),
    );
    note(ReplaceEngine, replaces_engine(&slipgate));
    guest.unplug();
    guest.plug()?;
    note(ServeTapAgain, soon(|| is_served(&guest)));
    let child = child(&slipgate, "slipgate-metrics").expect("a metrics process");
    signal(child, libc::SIGSTOP);
    note(EndStoppedChild, slipgate.stop().is_ok());
    signal(child, libc::SIGKILL);
    Ok((Some(kept), failed))
}

/// Returns the permitted capability set of a process, one bit for each.
fn capabilities(pid: u32) -> u64 {
    capability_set(pid, "CapPrm:").expect("a process")
}

fn capability_set(pid: u32, set: &str) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(set))?;
    u64::from_str_radix(line.trim(), 16).ok()
}

/// A process of the broker's, by its name.
fn child(slipgate: &Slipgate, name: &str) -> Option<u32> {
    slipgate.children_named(name).pop()
}

/// The engine is killed; its successor has not even a bounding set.
fn replaces_engine(slipgate: &Slipgate) -> bool {
    const ENGINE: &str = "slipgate-engine";
    let Some(before) = child(slipgate, ENGINE) else {
        return false;
    };
    signal(before, libc::SIGKILL);
    soon(|| {
        let now = child(slipgate, ENGINE).filter(|now| *now != before);
        now.and_then(|now| capability_set(now, "CapBnd:")) == Some(0)
    })
}

fn is_served(guest: &Guest) -> bool {
    let ping = || icmp::ping(SERVER, 1, 56, Duration::from_millis(300));
    guest.run(ping).is_ok_and(|told| !told.replies.is_empty())
}

/// The folder is nobody's from now on, and root is who may only do there what others may.
fn opens_log_again(slipgate: &Slipgate, folder: &Path, log: &Path) -> bool {
    fs::rename(log, log.with_extension("1")).expect("move the flow log away");
    chown(folder, Some(NOBODY), Some(NOBODY)).expect("give the folder away");
    fs::set_permissions(folder, fs::Permissions::from_mode(0o700)).expect("close the folder");
    signal(slipgate.broker_pid(), libc::SIGHUP);
    soon(|| log.exists())
}

fn soon(mut so: impl FnMut() -> bool) -> bool {
    let until = Instant::now() + WAIT;
    loop {
        let is_so = so();
        if is_so || Instant::now() > until {
            return is_so;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
