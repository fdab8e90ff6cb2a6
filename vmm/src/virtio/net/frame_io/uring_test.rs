use std::os::fd::AsRawFd;

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
