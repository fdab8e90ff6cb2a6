//! A directory on bpffs for one test's pins.

use std::{
    ffi::CString,
    fs, io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::{
    error::{Result, Tried, checked},
    owner,
};

const BPFFS: &str = "/sys/fs/bpf";
const PREFIX: &str = "slipgate-test-";
const BPF_FS_MAGIC: i64 = 0xcafe_4a11;

/// A fresh directory under `/sys/fs/bpf`, for `--pin-dir`; removed with all in it when the last
/// clone is dropped. Those of test processes that were killed are swept by the next one.
#[derive(Clone, Debug)]
pub struct PinDir {
    inner: Arc<Removed>,
}

#[derive(Debug)]
struct Removed(PathBuf);

impl PinDir {
    /// Makes the directory, and mounts bpffs if it is not mounted.
    ///
    /// # Errors
    /// bpffs cannot be mounted, or the directory cannot be made.
    pub fn new() -> Result<PinDir> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        ensure_bpffs().tried(format!("mount bpffs on {BPFFS}"))?;
        sweep();
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = Path::new(BPFFS).join(format!("{PREFIX}{}-{count}", owner::token()));
        fs::create_dir(&path).tried(format!("make {}", path.display()))?;
        Ok(PinDir {
            inner: Arc::new(Removed(path)),
        })
    }

    /// Path of the directory.
    pub fn path(&self) -> &Path {
        &self.inner.0
    }

    /// Everything pinned below it, as paths relative to it, in order.
    pub fn pins(&self) -> Vec<PathBuf> {
        let mut found = Vec::new();
        list(self.path(), self.path(), &mut found);
        found.sort();
        found
    }
}

impl Drop for Removed {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn list(root: &Path, directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        match entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            true => list(root, &path, found),
            false => found.extend(path.strip_prefix(root).map(Path::to_owned)),
        }
    }
}

fn sweep() {
    for entry in fs::read_dir(BPFFS).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let token = name
            .to_str()
            .and_then(|name| name.strip_prefix(PREFIX)?.rsplit_once('-'));
        if token.is_some_and(|(token, _)| !owner::alive(token)) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn ensure_bpffs() -> io::Result<()> {
    let path = CString::new(BPFFS).expect("no NUL in it");
    // SAFETY: statfs is plain data, for which zeroes are valid; the kernel fills it.
    let mut found: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the path is NUL-terminated and `found` writable.
    checked(unsafe { libc::statfs(path.as_ptr(), &raw mut found) })?;
    if found.f_type as i64 == BPF_FS_MAGIC {
        return Ok(());
    }
    let kind = c"bpf".as_ptr();
    // SAFETY: all strings are NUL-terminated; no data.
    checked(unsafe { libc::mount(kind, path.as_ptr(), kind, 0, std::ptr::null()) }).map(drop)
}
