//! Disks: what a guest writes is in the file, and what it may not write is refused.
use std::{fs, os::unix::fs::FileExt as _, path::PathBuf};

use slipgate_testbed::{require_kvm, require_root_and_tun};

use crate::{Bed, WAIT};

const MIB: u64 = 1 << 20;

impl Bed {
    /// A file of zeroes.
    fn disk(&self, name: &str, bytes: u64) -> PathBuf {
        let path = self.folder.path().join(name);
        fs::File::create(&path).unwrap().set_len(bytes).unwrap();
        path
    }

    /// Runs the built-in guest with these disks. Returns its exit status and the lines about disks.
    fn guest(&self, disks: &[String], work: &str) -> (Option<i32>, Vec<serde_json::Value>) {
        let work = format!("{work}; wait 1");
        let mut flags = vec!["--cmdline", &work];
        flags.extend(disks.iter().flat_map(|disk| ["--disk", disk]));
        let end = self.start_with(&flags).finish(WAIT).unwrap();
        (end.status.code(), end.said("disk"))
    }
}

#[test]
fn a_guest_finds_what_an_earlier_one_wrote_on_each_of_its_disks() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let paths = [bed.disk("a", 4 * MIB), bed.disk("b", MIB + 512)];
    let disks = paths.each_ref().map(|path| path.display().to_string());
    let (status, said) = bed.guest(&disks, "disk 0 write 3000320; disk 1 write 1049088");
    assert_eq!((status, said.len()), (Some(0), 2), "{said:?}");
    assert!(
        said.iter().all(|line| line.get("error").is_none()),
        "{said:?}"
    );
    let sizes = paths
        .each_ref()
        .map(|path| fs::metadata(path).unwrap().len());
    assert_eq!(sizes, [4 * MIB, MIB + 512]);
    let read_only = disks.each_ref().map(|disk| format!("{disk},ro"));
    let (status, said) = bed.guest(&read_only, "disk 0 check 3000320; disk 1 check 1049088");
    assert_eq!(status, Some(0), "{said:?}");

    // A byte that is another is noticed, so the guest has read the file.
    let file = fs::File::options().write(true).open(&paths[1]).unwrap();
    file.write_at(b"x", MIB + 511).unwrap();
    let (status, said) = bed.guest(&read_only, "disk 1 check 1049088");
    assert_eq!(status, Some(1), "{said:?}");
    assert_eq!(said[0]["error"], "byte 1049087 is wrong");
}

#[test]
fn what_a_guest_discards_and_makes_zeroes_is_so_in_the_file_in_each_cache_mode() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    for cache in ["writeback", "writethrough", "unsafe"] {
        let path = bed.disk(cache, 4 * MIB);
        let disk = [format!("{},cache={cache}", path.display())];
        let work = "disk 0 write 3145728; disk 0 discard 1048576; disk 0 check 512";
        let (status, said) = bed.guest(&disk, work);
        assert_eq!((status, said.len()), (Some(1), 3), "{said:?}");
        assert_eq!(said[1].get("error"), None, "{said:?}");
        assert_eq!(said[2]["error"], "byte 0 is wrong");
        let file = fs::read(&path).unwrap();
        let first = |file: &[u8]| file.iter().position(|byte| *byte != 0).unwrap() as u64;
        assert!(first(&file) >= MIB, "the first MiB is discarded");
        assert!(first(&file) < MIB + 512, "and no more");
        let (status, said) = bed.guest(&disk, "disk 0 zero 2097152");
        assert_eq!(status, Some(0), "{said:?}");
        let file = fs::read(&path).unwrap();
        assert_eq!(first(&file) / 512, 2 * MIB / 512, "two MiB are zeroes");
        assert_eq!(file.len() as u64, 4 * MIB);
    }
    let read_only = [format!("{},ro", bed.disk("ro", MIB).display())];
    let (status, said) = bed.guest(&read_only, "disk 0 discard 512; disk 0 zero 512");
    assert_eq!(status, Some(1), "{said:?}");
    for line in said {
        assert_eq!(line["error"], "the disk does not support the request");
    }
}

#[test]
fn a_guest_writes_neither_to_a_read_only_disk_nor_behind_its_end() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let path = bed.disk("a", MIB);
    let read_only = [format!("{},ro", path.display())];
    let (status, said) = bed.guest(&read_only, "disk 0 write 512");
    assert_eq!(status, Some(1), "{said:?}");
    assert_eq!(said[0]["error"], "the disk answered with an I/O error");
    assert!(fs::read(&path).unwrap().iter().all(|byte| *byte == 0));
    let disk = [path.display().to_string()];
    let (_, said) = bed.guest(&disk, "disk 0 write 1049088; disk 1 write 512");
    assert_eq!(said[0]["error"], "the disk has 2048 sectors");
    assert_eq!(said[1]["error"], "there is no such disk");
}

#[test]
fn a_disk_that_can_not_be_one_or_is_in_use_is_refused_with_its_name() {
    require_root_and_tun!();
    let bed = Bed::new();
    let odd = bed.disk("odd", 513).display().to_string();
    let used = bed.disk("used", MIB);
    let lock = fs::File::open(&used).unwrap();
    lock.lock_shared().unwrap();
    let used = used.display().to_string();
    for (disk, part) in [
        ("/nowhere/d,ro", "--disk /nowhere/d: it can't be read"),
        (odd.as_str(), "its size is 513 bytes"),
        (used.as_str(), "it is in use by another process"),
        (",ro", "there is no file in it"),
    ] {
        let end = bed.start_with(&["--disk", disk]).finish(WAIT).unwrap();
        assert_eq!(end.status.code(), Some(2), "{disk}: {}", end.stderr);
        assert!(end.stderr.contains(part), "{}", end.stderr);
    }
    bed.assert_nothing_is_left();
}
