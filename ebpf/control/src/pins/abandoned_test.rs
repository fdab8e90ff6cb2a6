use std::os::unix::ffi::OsStrExt as _;

use super::*;
use crate::{lock::PATIENCE, paths::PINS_FILE};

/// Makes a lock directory as a killed process leaves it.
fn left(run: &Path, name: &str) -> PathBuf {
    let dir = run.join(name);
    fs::create_dir_all(&dir).unwrap();
    for file in [
        "lock",
        "owner-0.lock",
        "netns-cookie",
        "0.sock",
        "0.policy",
        "0.policy-new",
        "0.taps",
        "0.hops",
    ] {
        fs::write(dir.join(file), "1").unwrap();
    }
    dir
}

fn nowhere() -> io::Result<Vec<PathBuf>> {
    Ok(Vec::new())
}

#[test]
fn what_the_dead_left_is_swept_and_what_somebody_has_is_not() {
    let root = tempfile::tempdir().unwrap();
    let run = root.path().join("run");
    let pins = root.path().join("pins");
    let make = |name: &str, pin_dir: &Path| {
        let dir = left(&run, name);
        fs::write(dir.join(PINS_FILE), pin_dir.as_os_str().as_bytes()).unwrap();
        dir
    };
    fs::create_dir(&pins).unwrap();
    let gone = pins.join("gone");
    let dead = make("dead", &gone);
    let pinned = make("pinned", &pins);
    let (starts, serves) = (make("starts", &gone), make("serves", &gone));
    let empty = run.join("empty");
    fs::create_dir(&empty).unwrap();
    let starting = FileLock::wait(&starts.join("lock"), PATIENCE).unwrap();
    let serving = FileLock::wait(&serves.join("owner-0.lock"), PATIENCE).unwrap();
    assert_eq!(sweep_run_dirs_in(&run, &nowhere), 2);
    assert!(!dead.exists() && !empty.exists());
    assert!(pinned.exists() && starts.exists() && serves.exists());
    drop((starting, serving));
    assert_eq!(sweep_run_dirs_in(&run, &nowhere), 2);
    assert!(pinned.exists() && !starts.exists() && !serves.exists());
}

#[test]
fn one_that_does_not_say_where_its_pins_are_is_known_by_its_name() {
    let root = tempfile::tempdir().unwrap();
    let run = root.path();
    let of = |pin_dir: &str| format!("4026531840-{}", hash_of(Path::new(pin_dir)));
    let gone = left(run, &of("/bpf/gone"));
    // Its process died as it wrote.
    let torn = left(run, &of("/bpf/torn"));
    fs::write(torn.join(PINS_FILE), "").unwrap();
    let there = left(run, &of("/bpf/a/there"));
    let lives = left(run, &of("/bpf/lives"));
    let (usual_gone, usual_there) = (left(run, "4026531841"), left(run, "4026531842"));
    let others = [
        "4026531840-12",
        "4026531840-x",
        "-0123456789abcdef",
        "notes",
        "1a",
    ];
    let others = others.map(|name| left(run, name));
    let file = run.join("4026531843");
    fs::write(&file, "").unwrap();
    let living = FileLock::wait(&lives.join("owner-0.lock"), PATIENCE).unwrap();
    let pinned = || {
        Ok(["/bpf/a/there", "/sys/fs/bpf/slipgate/4026531842"]
            .map(PathBuf::from)
            .into())
    };
    let unknown = || Err(io::ErrorKind::PermissionDenied.into());
    assert_eq!(sweep_run_dirs_in(run, &unknown), 0, "they may be there");
    assert_eq!(sweep_run_dirs_in(run, &pinned), 3);
    assert!(!gone.exists() && !torn.exists() && !usual_gone.exists());
    assert!(there.exists() && lives.exists() && usual_there.exists() && file.exists());
    assert!(others.iter().all(|other| other.exists()), "somebody else's");
    drop(living);
    assert_eq!(sweep_run_dirs_in(run, &pinned), 1);
    assert!(!lives.exists());
}

#[test]
fn a_bpffs_is_found_wherever_it_is_mounted() {
    let at = |line: &str| bpffs_at(line.as_bytes());
    let line = "35 27 0:31 / /sys/fs/bpf rw,nosuid shared:11 master:2 - bpf bpf rw,mode=700";
    assert_eq!(at(line), Some("/sys/fs/bpf".into()));
    let odd = "36 27 0:32 / /mnt/a\\040b\\134c rw - bpf none rw";
    assert_eq!(at(odd), Some("/mnt/a b\\c".into()));
    assert_eq!(at("37 27 0:33 / /bpf rw - tmpfs bpf rw"), None);
    assert_eq!(at("38 27 0:34 / /bpf rw"), None);
    assert_eq!(at(""), None);
}
