//! Report on a hanging machine inside the machine, written while it still hangs. Without it, only
//! the killed QEMU would be visible.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    sync::mpsc::{Receiver, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

/// Time without output after which the machine counts as stuck: several times the longest of the
/// client's checks under load, and less than the time limit of the whole machine.
const PATIENCE: Duration = Duration::from_secs(90);
/// Interval of two samples: a state that differs between them does not hang.
const BETWEEN: Duration = Duration::from_secs(2);
/// Time limit for the report of a stuck machine.
const ENDING: Duration = Duration::from_secs(10);

/// Waits for the sender of `alive` to be dropped. When nothing came of it for too long, it says what all
/// of it is at, and ends `vmm` so that its report is written: by a request first. Whether it was too
/// long.
pub(super) fn watch(vmm: u32, alive: &Receiver<()>) -> bool {
    loop {
        match alive.recv_timeout(PATIENCE) {
            Ok(()) => {}
            Err(RecvTimeoutError::Disconnected) => return false,
            Err(RecvTimeoutError::Timeout) => break,
        }
    }
    println!("FAILED nested says nothing for {PATIENCE:?}; what it is at, twice:");
    for _ in 0..2 {
        tell(Path::new("/proc/interrupts"));
        let mut connections = BTreeSet::new();
        for process in processes() {
            tell_process(&process, &mut connections);
        }
        connections.iter().for_each(|of_one| println!("{of_one}"));
        thread::sleep(BETWEEN);
    }
    for signal in [libc::SIGTERM, libc::SIGKILL] {
        println!("ending {vmm} by signal {signal}");
        // It was not waited for: its output has not ended.
        slipgate_testbed::signal(vmm, signal);
        if is_over(alive, ENDING) {
            break;
        }
    }
    true
}

fn is_over(alive: &Receiver<()>, within: Duration) -> bool {
    let until = Instant::now() + within;
    loop {
        match alive.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(()) => {}
            Err(why) => return why == RecvTimeoutError::Disconnected,
        }
    }
}

/// Returns the processes that run a program, without kernel threads.
fn processes() -> Vec<PathBuf> {
    entries(Path::new("/proc"))
        .into_iter()
        .filter(|path| fs::read(path.join("cmdline")).is_ok_and(|words| !words.is_empty()))
        .collect()
}

/// Where each of its threads is in the kernel, and how long it ran. Adds the TCP connections of
/// their network namespaces.
fn tell_process(process: &Path, connections: &mut BTreeSet<String>) {
    let words = fs::read(process.join("cmdline")).unwrap_or_default();
    let words = String::from_utf8_lossy(&words).replace('\0', " ");
    println!("== {} {words}", process.display());
    for task in entries(&process.join("task")) {
        for file in ["stat", "schedstat", "stack"] {
            tell(&task.join(file));
        }
        connections.extend(fs::read_to_string(task.join("net/tcp")));
    }
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let all = fs::read_dir(folder).into_iter().flatten().flatten();
    all.map(|entry| entry.path()).collect()
}

fn tell(file: &Path) {
    match fs::read_to_string(file) {
        Ok(text) => println!("-- {}\n{text}", file.display()),
        Err(error) => println!("-- {} {error}", file.display()),
    }
}
