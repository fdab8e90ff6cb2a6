use std::{fs, path::Path};

use super::*;
use crate::{
    lock::FileLock,
    paths::{COOKIE_FILE, PINS_FILE},
};

const INODE: u64 = 4_026_531_840;
const COOKIE: u64 = 77;

struct Stage {
    at: tempfile::TempDir,
}

impl Stage {
    fn new() -> Stage {
        let at = tempfile::tempdir().unwrap();
        for dir in ["run", "bpf"] {
            fs::create_dir(at.path().join(dir)).unwrap();
        }
        Stage { at }
    }

    fn run(&self) -> std::path::PathBuf {
        self.at.path().join("run")
    }

    /// Makes a set of pins as a process leaves it.
    fn set(&self, run_name: &str, root: &str, cookie: u64) -> Paths {
        let paths = Paths {
            pin_dir: self.at.path().join("bpf").join(root).join("4026531840"),
            run_dir: self.run().join(run_name),
        };
        fs::create_dir_all(&paths.pin_dir).unwrap();
        fs::create_dir_all(&paths.run_dir).unwrap();
        fs::write(paths.pin_dir.join("FLOWS"), "").unwrap();
        fs::write(paths.run_dir.join(COOKIE_FILE), cookie.to_string()).unwrap();
        let pins = paths.pin_dir.to_str().unwrap();
        fs::write(paths.run_dir.join(PINS_FILE), pins).unwrap();
        paths
    }

    fn check(&self, paths: &Paths) -> Result<()> {
        check_in(&self.run(), paths, INODE, COOKIE)
    }
}

fn hold(paths: &Paths) -> FileLock {
    let lock = paths.run_dir.join("owner-0.lock");
    FileLock::take(&lock).unwrap().unwrap()
}

fn ours(stage: &Stage) -> Paths {
    Paths {
        pin_dir: stage.at.path().join("bpf/ours/4026531840"),
        run_dir: stage.run().join("4026531840"),
    }
}

#[test]
fn nobody_else_and_who_joins_is_fine() {
    let stage = Stage::new();
    stage.check(&ours(&stage)).unwrap();
    // Another namespace's.
    let other = stage.set("4026531841", "other", 78);
    let _lives = hold(&other);
    stage.check(&ours(&stage)).unwrap();
    // One joins it; with its own.
    let same = stage.set("4026531840", "ours", COOKIE);
    let _lives = hold(&same);
    stage.check(&same).unwrap();
}

#[test]
fn another_that_lives_is_named() {
    let stage = Stage::new();
    let other = stage.set("4026531840-00112233445566ff", "other", COOKIE);
    let lives = hold(&other);
    let error = stage.check(&ours(&stage)).unwrap_err().to_string();
    let root = stage.at.path().join("bpf/other");
    assert!(
        error.contains(&format!("--pin-dir {}", root.display())),
        "{error}"
    );
    drop(lives);
    // It was killed, and its flows live.
    let error = stage.check(&ours(&stage)).unwrap_err();
    assert!(matches!(error, Error::LeftPins { .. }), "{error}");
    // They are gone.
    fs::remove_dir_all(root).unwrap();
    stage.check(&ours(&stage)).unwrap();
}

#[test]
fn what_a_namespace_of_the_same_number_left_is_no_matter() {
    let stage = Stage::new();
    stage.set("4026531840-00112233445566ff", "other", COOKIE - 1);
    stage.check(&ours(&stage)).unwrap();
}

#[test]
fn pins_that_cannot_be_seen_are_not_made_anew() {
    let stage = Stage::new();
    let same = stage.set("4026531840", "ours", COOKIE);
    let _lives = hold(&same);
    fs::remove_file(same.pin_dir.join("FLOWS")).unwrap();
    let error = stage.check(&same).unwrap_err();
    assert!(matches!(error, Error::PinsHidden { .. }), "{error}");
    assert!(Path::new(&same.run_dir).exists());
}
