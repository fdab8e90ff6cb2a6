use std::fs::File;

use io_uring::{squeue, types::Fixed};

use super::*;
use crate::virtio::block::DiskConfig;

fn ring() -> (Uring, File) {
    let file = tempfile::tempfile().unwrap();
    file.set_len(4096).unwrap();
    let config = DiskConfig::plain(file.try_clone().unwrap());
    let mut uring = Uring::new(Arc::new(Image::new(config).unwrap())).unwrap();
    uring.begin().unwrap();
    (uring, file)
}

fn result(uring: &mut Uring, entry: &squeue::Entry) -> i32 {
    // SAFETY: no entry of these tests has memory.
    unsafe { uring.ring.submission().push(entry) }.unwrap();
    uring.ring.submit_and_wait(1).unwrap();
    uring.ring.completion().next().unwrap().result()
}

#[test]
fn only_operations_of_the_one_file_are_possible() {
    let (mut uring, _file) = ring();
    let other = tempfile::tempfile().unwrap();
    let none = std::ptr::null();
    let denied = [
        opcode::Nop::new().build(),
        opcode::Nop::new().build().flags(squeue::Flags::FIXED_FILE),
        opcode::Readv::new(types::Fd(other.as_raw_fd()), none, 0).build(),
        opcode::Fsync::new(types::Fd(other.as_raw_fd())).build(),
        opcode::Read::new(Fixed(0), std::ptr::null_mut(), 0).build(),
        opcode::OpenAt::new(types::Fd(libc::AT_FDCWD), c"/".as_ptr()).build(),
        opcode::Readv::new(Fixed(0), none, 0)
            .build()
            .flags(squeue::Flags::ASYNC),
    ];
    for entry in denied {
        assert_eq!(result(&mut uring, &entry), -libc::EACCES);
    }
    let read = opcode::Readv::new(Fixed(0), none, 0).build();
    assert_ne!(result(&mut uring, &read), -libc::EACCES);
    let second = uring.ring.submitter().register_files(&[other.as_raw_fd()]);
    assert_eq!(second.unwrap_err().raw_os_error(), Some(libc::EACCES));
}
