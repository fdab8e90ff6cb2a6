//! Starting a process in namespaces of its own.
//!
//! # Theory of operation
//! A process enters a PID namespace by being made in it, so this is clone(2) and not
//! [`std::process::Command`]. It is not clone3(2): seccomp profiles of containers and systemd's
//! `RestrictNamespaces=` can't look at the flags of that, and answer it by ENOSYS. The other namespaces a process can enter by itself, and the VMM does
//! (`cli/src/sandbox/jail.rs`). Root makes the PID namespace as it is. Who is not root makes it in a
//! user namespace, in which it is root: the new process keeps its capabilities in there over the
//! execve, and builds the rest of its jail by them.
//!
//! Between clone and execve the child makes system calls only, with memory that was prepared before.
//! What fails there comes back by a pipe that the execve closes, and that is read when whoever starts
//! it has nothing else to do ([`Child::await_execve`]).
use std::{
    ffi::{CStr, CString},
    fs::File,
    io::{self, PipeReader, Read as _},
    os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd},
};

use nix::{
    errno::Errno,
    sys::wait::{Id, WaitPidFlag, WaitStatus, waitid},
    unistd::{getegid, geteuid},
};

/// Path of the binary that is executed: this very one.
const BINARY: &CStr = c"/proc/self/exe";

/// Arguments and descriptors of a new process.
pub(crate) struct Program {
    /// Its name and arguments.
    pub(crate) arguments: Vec<CString>,
    /// Its environment, as `NAME=value` strings.
    pub(crate) environment: Vec<CString>,
    /// Called in the child before the execve; makes system calls only.
    pub(crate) prepare: fn(RawFd) -> io::Result<()>,
    /// Descriptor that `prepare` is called with.
    pub(crate) inherited: RawFd,
}

/// Namespaces of a new process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Namespaces {
    /// Those of this process.
    Ours,
    /// A PID namespace of its own; in a user namespace of its own too, unless this process is root.
    Own,
}

/// A child of this process.
#[derive(Debug)]
pub(crate) struct Child {
    pid: u32,
    pidfd: OwnedFd,
    /// The error of what failed before the execve, or nothing; `None` once it was read.
    errors: Option<PipeReader>,
    ended: Option<WaitStatus>,
}

impl Program {
    /// Starts it; [`Child::await_execve`] says whether it is executed.
    ///
    /// # Errors
    /// The kernel refuses the process or its namespaces.
    pub(crate) fn start(&self, namespaces: Namespaces) -> io::Result<Child> {
        let pointers = |texts: &[CString]| -> Vec<*const libc::c_char> {
            let all = texts.iter().map(|text| text.as_ptr());
            all.chain([std::ptr::null()]).collect()
        };
        let (arguments, environment) = (pointers(&self.arguments), pointers(&self.environment));
        let null = File::options().read(true).write(true).open("/dev/null")?;
        let (errors, report) = io::pipe()?;
        let is_root = geteuid().is_root();
        let own_user = namespaces == Namespaces::Own && !is_root;
        let (user, group) = (geteuid(), getegid());
        let maps = own_user.then(|| {
            let map = |id: u32| format!("0 {id} 1").into_bytes();
            [map(user.as_raw()), map(group.as_raw())]
        });
        let mut flags = libc::CLONE_PIDFD | libc::SIGCHLD;
        if namespaces == Namespaces::Own {
            flags |= libc::CLONE_NEWPID;
        }
        if own_user {
            flags |= libc::CLONE_NEWUSER;
        }
        let mut pidfd: RawFd = -1;
        // The arguments after the stack differ between architectures but for this one, where the
        // kernel writes the pidfd.
        // SAFETY: as fork(2): the child has a copy of all memory, no stack of its own to be given,
        // and goes on below.
        let pid = unsafe {
            let pidfd = &raw mut pidfd;
            libc::syscall(
                libc::SYS_clone,
                flags as libc::c_long,
                0_usize,
                pidfd,
                0_usize,
                0_usize,
            )
        };
        match pid {
            -1 => return Err(io::Error::last_os_error()),
            0 => {
                let failed = self.become_program(&null, maps.as_ref(), &arguments, &environment);
                let errno = failed.raw_os_error().unwrap_or(libc::EIO);
                // SAFETY: the pointer and the length are those of `errno`; then the child ends.
                unsafe {
                    let of = (&raw const errno).cast();
                    libc::write(report.as_raw_fd(), of, size_of_val(&errno));
                    libc::_exit(127)
                }
            }
            _ => {}
        }
        // SAFETY: the kernel made it for us just now.
        let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
        Ok(Child {
            // The kernel's process ids are positive.
            pid: pid as u32,
            pidfd,
            errors: Some(errors),
            ended: None,
        })
    }

    /// In the child. Returns when something failed.
    fn become_program(
        &self,
        null: &File,
        maps: Option<&[Vec<u8>; 2]>,
        arguments: &[*const libc::c_char],
        environment: &[*const libc::c_char],
    ) -> io::Error {
        if let Some([users, groups]) = maps {
            let files: [(&CStr, &[u8]); 3] = [
                // Without it a group may not be mapped by who has no privilege.
                (c"/proc/self/setgroups", b"deny"),
                (c"/proc/self/uid_map", users),
                (c"/proc/self/gid_map", groups),
            ];
            for (path, text) in files {
                if let Err(e) = put(path, text) {
                    return e;
                }
            }
        }
        if let Err(e) = (self.prepare)(self.inherited) {
            return e;
        }
        for fd in [libc::STDIN_FILENO, libc::STDOUT_FILENO] {
            // SAFETY: numbers.
            if unsafe { libc::dup2(null.as_raw_fd(), fd) } < 0 {
                return io::Error::last_os_error();
            }
        }
        // SAFETY: both lists end by a null pointer, and their texts live as long as `self`.
        unsafe {
            libc::execve(BINARY.as_ptr(), arguments.as_ptr(), environment.as_ptr());
        }
        io::Error::last_os_error()
    }
}

/// Writes a file of /proc, by system calls alone.
fn put(path: &CStr, text: &[u8]) -> io::Result<()> {
    // SAFETY: the path is terminated; the pointer and the length are those of `text`.
    let wrote = unsafe {
        let fd = libc::open(path.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        libc::write(fd, text.as_ptr().cast(), text.len())
    };
    match usize::try_from(wrote) {
        Ok(all) if all == text.len() => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

impl Child {
    /// Waits until the program is executed.
    ///
    /// # Errors
    /// What failed in the child before; it has ended then.
    pub(crate) fn await_execve(&mut self) -> io::Result<()> {
        let Some(mut errors) = self.errors.take() else {
            return Ok(());
        };
        let mut errno = [0; size_of::<i32>()];
        match errors.read_exact(&mut errno) {
            // Closed by the execve.
            Err(_) => Ok(()),
            Ok(()) => {
                self.wait();
                Err(io::Error::from_raw_os_error(i32::from_ne_bytes(errno)))
            }
        }
    }

    /// Process id, in this process's namespace.
    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// Readable when the process has ended.
    pub(crate) fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// How the process ended; `None` while it runs.
    pub(crate) fn try_wait(&mut self) -> nix::Result<Option<WaitStatus>> {
        if self.ended.is_none() {
            let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG;
            self.ended = match waitid(Id::PIDFd(self.pidfd.as_fd()), flags)? {
                WaitStatus::StillAlive => None,
                ended => Some(ended),
            };
        }
        Ok(self.ended)
    }

    /// Ends it, and everything else in a PID namespace of its own.
    pub(crate) fn kill(&mut self) {
        if self.ended.is_none() {
            // SAFETY: numbers, and no siginfo. An error means that it has ended already.
            unsafe {
                libc::syscall(
                    libc::SYS_pidfd_send_signal,
                    self.pidfd.as_raw_fd(),
                    libc::SIGKILL,
                    std::ptr::null::<libc::siginfo_t>(),
                    0,
                );
            }
        }
    }

    pub(crate) fn wait(&mut self) {
        while self.ended.is_none() {
            match waitid(Id::PIDFd(self.pidfd.as_fd()), WaitPidFlag::WEXITED) {
                Ok(ended) => self.ended = Some(ended),
                Err(Errno::EINTR) => {}
                Err(_) => return,
            }
        }
    }
}

#[cfg(test)]
#[path = "spawn_test.rs"]
mod tests;
