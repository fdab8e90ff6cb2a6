use std::os::fd::AsRawFd;

use io_uring::squeue;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};

use super::*;

fn result(uring: &mut Uring, entry: squeue::Entry) -> i32 {
    // SAFETY: the requests of these tests are refused, or point to nothing.
    unsafe { uring.ring.submission().push(&entry) }.unwrap();
    uring.ring.submit_and_wait(1).unwrap();
    uring.ring.completion().next().unwrap().result()
}

#[test]
fn only_reads_and_writes_of_the_one_descriptor_are_possible() {
    let flags = SockFlag::SOCK_NONBLOCK;
    let pair = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags);
    let (ours, other) = pair.unwrap();
    let mut uring = Uring::new(ours.as_raw_fd()).unwrap();
    uring.begin().unwrap();
    let none = std::ptr::null();
    let denied = [
        opcode::Nop::new().build(),
        opcode::Nop::new().build().flags(squeue::Flags::FIXED_FILE),
        opcode::Readv::new(io_uring::types::Fd(other.as_raw_fd()), none, 0).build(),
        opcode::Read::new(Fixed(0), std::ptr::null_mut(), 0).build(),
        opcode::Readv::new(Fixed(0), none, 0)
            .build()
            .flags(squeue::Flags::ASYNC),
    ];
    for entry in denied {
        assert_eq!(result(&mut uring, entry), -libc::EACCES);
    }
    let read = opcode::Readv::new(Fixed(0), none, 0).rw_flags(libc::RWF_NOWAIT);
    assert_ne!(result(&mut uring, read.build()), -libc::EACCES);
    let file = uring.ring.submitter().register_files(&[other.as_raw_fd()]);
    assert_eq!(file.unwrap_err().raw_os_error(), Some(libc::EACCES));
}

/// A call that the kernel refuses leaves its requests in the queue. They point to buffers of a
/// driver that may be gone: the next call must not submit them.
#[test]
fn after_a_failure_nothing_is_submitted_again() {
    let flags = SockFlag::SOCK_NONBLOCK;
    let pair = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags);
    let (ours, other) = pair.unwrap();
    let mut uring = Uring::new(ours.as_raw_fd()).unwrap();
    uring.begin().unwrap();
    let mut bytes = *b"stale";
    let piece = libc::iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: bytes.len(),
    };
    let write = |piece: &libc::iovec| Transfer {
        pieces: piece,
        count: 1,
        direction: Direction::Write,
        result: 0,
    };
    // The ring belongs to this thread: the kernel accepts no request from another one.
    let at = &raw const piece as usize;
    let mut uring = thread::spawn(move || {
        // SAFETY: the piece outlives the thread, which is joined.
        let piece = unsafe { &*(at as *const libc::iovec) };
        // SAFETY: the piece is mapped.
        let failed = unsafe { uring.transfer(&mut [write(piece)]) };
        assert!(failed.is_err());
        uring
    })
    .join()
    .unwrap();
    // SAFETY: as above.
    let again = unsafe { uring.transfer(&mut [write(&piece)]) };
    assert!(again.is_err(), "it can't be used further");
    let got = nix::sys::socket::recv(
        other.as_raw_fd(),
        &mut [0; 16],
        nix::sys::socket::MsgFlags::MSG_DONTWAIT,
    );
    assert_eq!(got, Err(nix::Error::EAGAIN), "nothing was sent");
}
