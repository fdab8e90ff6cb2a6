//! A file whose fsync waits until a test lets it go, whoever asks for it and however: the one file of
//! a FUSE file system that this process serves (linux/fuse.h).
use std::{
    fs::File,
    io::{Read as _, Write as _},
    os::fd::AsRawFd as _,
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread,
};

use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, unshare},
};

/// Operations of the kernel's requests.
mod op {
    pub(super) const FORGET: u32 = 2;
    pub(super) const GETATTR: u32 = 3;
    pub(super) const OPEN: u32 = 14;
    pub(super) const READ: u32 = 15;
    pub(super) const WRITE: u32 = 16;
    pub(super) const RELEASE: u32 = 18;
    pub(super) const FSYNC: u32 = 20;
    pub(super) const FLUSH: u32 = 25;
    pub(super) const INIT: u32 = 26;
    pub(super) const INTERRUPT: u32 = 36;
}

const HEADER_BYTES: usize = 40;
/// Place of the data of a write, behind `fuse_write_in`.
const WRITTEN_AT: usize = HEADER_BYTES + 40;
const MAX_WRITE: u32 = 1 << 17;

#[derive(Debug, Default)]
struct Gate {
    /// Results of the next fsyncs: 0, or an errno. None there: an fsync waits.
    results: Vec<i32>,
    is_open: bool,
    /// Number of fsyncs that came.
    asked: usize,
}

/// What holds the fsyncs of a file back. They all go on when it is dropped.
#[derive(Debug, Default)]
pub(super) struct Syncs {
    gate: Arc<(Mutex<Gate>, Condvar)>,
}

impl Syncs {
    /// Returns how many fsyncs have come.
    pub(super) fn asked(&self) -> usize {
        self.gate.0.lock().unwrap().asked
    }

    /// Lets one fsync go: 0, or the errno with which it fails.
    pub(super) fn let_one_go(&self, errno: i32) {
        self.gate.0.lock().unwrap().results.push(errno);
        self.gate.1.notify_all();
    }
}

impl Drop for Syncs {
    fn drop(&mut self) {
        let mut gate = self.gate.0.lock().unwrap_or_else(PoisonError::into_inner);
        gate.is_open = true;
        self.gate.1.notify_all();
    }
}

/// Device by which a process serves a file system.
pub(super) const FUSE: &str = "/dev/fuse";

/// Returns a file of so many zeroes, and what holds its fsyncs back. It needs [`FUSE`].
pub(super) fn gated_file(bytes: usize) -> (File, Syncs) {
    let syncs = Syncs::default();
    let gate = syncs.gate.clone();
    // A thread of its own, for its mount namespace.
    let opening = thread::spawn(move || {
        unshare(CloneFlags::CLONE_NEWNS).unwrap();
        let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
        mount(None::<&str>, "/", None::<&str>, private, None::<&str>).unwrap();
        let channel = File::options().read(true).write(true).open(FUSE);
        let channel = channel.unwrap();
        let point = tempfile::NamedTempFile::new().unwrap();
        // The root of the file system is the file.
        let fd = channel.as_raw_fd();
        let options = format!("fd={fd},rootmode=100644,user_id=0,group_id=0");
        let none = MsFlags::empty();
        let options = Some(options.as_str());
        mount(Some("gated"), point.path(), Some("fuse"), none, options).unwrap();
        thread::spawn(move || serve(channel, &gate, vec![0; bytes]));
        let file = File::options().read(true).write(true).open(point.path());
        umount2(point.path(), MntFlags::MNT_DETACH).unwrap();
        file.unwrap()
    });
    (opening.join().unwrap(), syncs)
}

/// Answers the kernel's requests until the file is closed.
fn serve(mut channel: File, gate: &(Mutex<Gate>, Condvar), mut contents: Vec<u8>) {
    let mut request = vec![0; MAX_WRITE as usize + 4096];
    while let Ok(length) = channel.read(&mut request) {
        let request = &request[..length];
        let word = |at: usize| u32::from_le_bytes(request[at..at + 4].try_into().unwrap());
        let place = || word(HEADER_BYTES + 8) as usize;
        let size = || word(HEADER_BYTES + 16) as usize;
        let (error, answer) = match word(4) {
            op::FORGET | op::INTERRUPT => continue,
            op::INIT => (0, init()),
            op::GETATTR => (0, attributes(contents.len())),
            op::OPEN => (0, vec![0; 16]),
            op::READ => {
                let end = contents.len().min(place() + size());
                (0, contents[place().min(end)..end].to_vec())
            }
            op::WRITE => {
                let data = &request[WRITTEN_AT..][..size()];
                contents[place()..][..data.len()].copy_from_slice(data);
                (0, u64::from(size() as u32).to_le_bytes().to_vec())
            }
            op::FSYNC => (wait(gate), Vec::new()),
            op::FLUSH | op::RELEASE => (0, Vec::new()),
            _ => (libc::ENOSYS, Vec::new()),
        };
        let mut reply = (16 + answer.len() as u32).to_le_bytes().to_vec();
        reply.extend((-error).to_le_bytes());
        reply.extend(&request[8..16]);
        reply.extend(answer);
        // One whose request was given up meanwhile is refused.
        let _ = channel.write(&reply);
    }
}

/// Waits until an fsync may go on. Returns its result.
fn wait((gate, changed): &(Mutex<Gate>, Condvar)) -> i32 {
    let mut gate = gate.lock().unwrap();
    gate.asked += 1;
    let shut = |gate: &mut Gate| gate.results.is_empty() && !gate.is_open;
    let mut gate = changed.wait_while(gate, shut).unwrap();
    gate.results.pop().unwrap_or(0)
}

/// `fuse_init_out`: version 7.31, nothing that is optional.
fn init() -> Vec<u8> {
    let words = [7, 31, 0, 0, 0, MAX_WRITE, 1, 0];
    let mut answer: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
    answer.resize(64, 0);
    answer
}

/// `fuse_attr_out` of a regular file.
fn attributes(bytes: usize) -> Vec<u8> {
    let mut answer = vec![0; 104];
    let mut put = |at: usize, value: u32| answer[at..at + 4].copy_from_slice(&value.to_le_bytes());
    // Inode, size, mode, links.
    for (at, value) in [(16, 1), (24, bytes as u32), (76, 0o100_644), (80, 1)] {
        put(at, value);
    }
    answer
}
