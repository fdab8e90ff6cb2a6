//! Linux's native asynchronous I/O (io_setup(2)): requests of one thread that are under way together.
//!
//! Of a block device opened with O_DIRECT they are so in the device, and the thread that begins them is
//! the one that hears of their ends. So a guest with one CPU measures its disk, and not the hand-over
//! between threads of its own; io_uring would do the same with rings to be mapped and kept.

use std::{
    io,
    os::fd::{AsRawFd as _, BorrowedFd},
};

use super::buffers::Buffers;
use crate::error::checked_len;

const PREAD: u16 = 0;
const PWRITE: u16 = 1;

/// `struct iocb` of linux/aio_abi.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Iocb {
    data: u64,
    key: u32,
    rw_flags: u32,
    opcode: u16,
    priority: i16,
    file: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    event_fd: u32,
}

/// `struct io_event` of the same.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Event {
    data: u64,
    iocb: u64,
    result: i64,
    result2: i64,
}

/// A context for requests to one file, each with a buffer of [`Buffers`] that it alone uses.
pub(super) struct Aio<'a> {
    context: libc::c_ulong,
    file: BorrowedFd<'a>,
    buffers: &'a mut Buffers,
    under_way: Vec<bool>,
}

/// A request that has ended: its buffer's number and the bytes that it moved.
pub(super) struct Done {
    pub(super) buffer: usize,
    pub(super) result: io::Result<usize>,
}

impl<'a> Aio<'a> {
    /// Makes a context for as many requests as there are buffers.
    ///
    /// # Errors
    /// The kernel has no native asynchronous I/O, or no room for it.
    pub(super) fn new(file: BorrowedFd<'a>, buffers: &'a mut Buffers) -> io::Result<Self> {
        let many = buffers.count();
        let mut context: libc::c_ulong = 0;
        // SAFETY: the context is writable and zero, as io_setup wants it.
        checked_len(unsafe {
            libc::syscall(libc::SYS_io_setup, many as libc::c_long, &raw mut context) as isize
        })?;
        Ok(Self {
            context,
            file,
            buffers,
            under_way: vec![false; many],
        })
    }

    /// The bytes of a buffer.
    ///
    /// # Panics
    /// A request with it is under way.
    pub(super) fn buffer(&mut self, buffer: usize) -> &mut [u8] {
        assert!(!self.under_way[buffer], "the kernel has buffer {buffer}");
        self.buffers.of(buffer)
    }

    /// Begins a read into a buffer, or a write from it, at a byte of the file.
    ///
    /// # Errors
    /// The kernel refuses it; then it is not under way.
    ///
    /// # Panics
    /// A request with this buffer is under way.
    pub(super) fn begin(&mut self, buffer: usize, write: bool, offset: u64) -> io::Result<()> {
        let bytes = self.buffer(buffer);
        let mut iocb = Iocb {
            data: buffer as u64,
            opcode: if write { PWRITE } else { PREAD },
            buffer: bytes.as_mut_ptr() as u64,
            bytes: bytes.len() as u64,
            file: self.file.as_raw_fd() as u32,
            offset: offset as i64,
            ..Iocb::default()
        };
        let mut list = [&raw mut iocb];
        // SAFETY: the kernel copies the iocb during the call. It uses the buffer until the request ends:
        // that is memory which `buffers` keeps, nobody gets a reference to it while `under_way` says so,
        // and the context, whose end waits for all requests, ends before this borrow of `buffers` does.
        checked_len(unsafe {
            libc::syscall(
                libc::SYS_io_submit,
                self.context,
                1 as libc::c_long,
                list.as_mut_ptr(),
            ) as isize
        })?;
        self.under_way[buffer] = true;
        Ok(())
    }

    /// Waits until a request has ended. `done` has those that have, and nothing of before.
    ///
    /// # Errors
    /// The kernel refuses to wait.
    pub(super) fn wait(&mut self, done: &mut Vec<Done>) -> io::Result<()> {
        let mut events = [Event::default(); 32];
        // SAFETY: as many events are writable as the call is told; no time limit is given.
        let ended = checked_len(unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                self.context,
                1 as libc::c_long,
                events.len() as libc::c_long,
                events.as_mut_ptr(),
                std::ptr::null::<libc::timespec>(),
            ) as isize
        });
        let ended = match ended {
            Err(why) if why.kind() == io::ErrorKind::Interrupted => 0,
            other => other?,
        };
        done.clear();
        for event in &events[..ended] {
            let buffer = event.data as usize;
            self.under_way[buffer] = false;
            let result = match usize::try_from(event.result) {
                Ok(bytes) => Ok(bytes),
                Err(_) => Err(io::Error::from_raw_os_error(-event.result as i32)),
            };
            done.push(Done { buffer, result });
        }
        Ok(())
    }
}

impl Drop for Aio<'_> {
    fn drop(&mut self) {
        // SAFETY: the context is this one's alone. The call waits for requests under way.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}
