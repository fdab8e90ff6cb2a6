use std::path::Path;

use super::*;

fn spec(path: &Path, read_only: bool) -> DiskSpec {
    DiskSpec {
        path: path.to_owned(),
        read_only,
        cache: DiskCache::default(),
        rate: RateLimit::default(),
    }
}

#[test]
fn a_disk_that_may_be_written_has_one_user_and_others_share_theirs() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    std::fs::write(&path, [0; 1024]).unwrap();
    let shared = open(&spec(&path, true)).unwrap();
    let also = open(&spec(&path, true)).unwrap();
    let refused = open(&spec(&path, false)).unwrap_err().to_string();
    assert!(refused.contains("in use"), "{refused}");
    // The lock is the descriptor's: a copy that another process has keeps it.
    let handed = shared.file.try_clone().unwrap();
    drop((shared, also));
    assert!(open(&spec(&path, false)).is_err());
    drop(handed);
    let alone = open(&spec(&path, false)).unwrap();
    assert!(open(&spec(&path, true)).is_err());
    assert!(!alone.read_only);
}

#[test]
fn a_file_without_direct_transfers_is_refused_with_a_remedy() {
    let direct = |path: &Path| {
        let cache = DiskCache::None;
        open(&DiskSpec {
            cache,
            ..spec(path, true)
        })
    };
    // A regular file that the kernel makes up.
    let made_up = Path::new("/sys/kernel/mm/transparent_hugepage/enabled");
    if made_up.exists() {
        let said = direct(made_up).unwrap_err().to_string();
        let name = made_up.display().to_string();
        assert!(said.contains(&name) && said.contains("O_DIRECT"), "{said}");
        assert!(said.contains("leave cache=none out"), "{said}");
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    std::fs::write(&path, [0; 4096]).unwrap();
    match direct(&path) {
        Ok(disk) => {
            // SAFETY: no memory is passed.
            let flags = unsafe { libc::fcntl(disk.file.as_raw_fd(), libc::F_GETFL) };
            assert_ne!(flags & libc::O_DIRECT, 0);
        }
        Err(why) => println!("skipped: the file system of temporary files: {why}"),
    }
}

#[test]
fn what_can_be_no_disk_is_refused_with_a_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    let error = |path: &Path, read_only| open(&spec(path, read_only)).unwrap_err().to_string();
    assert!(error(&path, false).contains("can't be written"));
    assert!(error(&path, true).contains("can't be read"));
    for size in [0, 511, 513] {
        std::fs::write(&path, vec![0; size]).unwrap();
        let said = error(&path, false);
        assert!(said.contains(&format!("{size} bytes")), "{said}");
    }
    assert!(error(folder.path(), true).contains("neither"));
    assert!(error(Path::new("/dev/zero"), true).contains("neither"));
}
