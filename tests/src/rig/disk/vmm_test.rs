use std::os::fd::{FromRawFd as _, OwnedFd};

use super::*;

#[test]
fn threads_that_carry_requests_out_are_known_by_their_names() {
    let qemu = DiskVmm::QemuIoUring;
    assert!(qemu.is_device("IO io") && qemu.is_device("worker") && qemu.is_device("iou-wrk-7"));
    assert!(!qemu.is_device("CPU 0/KVM") && !qemu.is_device("qemu-system-x86"));
    let ours = DiskVmm::Slipgate;
    assert!(ours.is_device("disk0-0") && ours.is_device("iou-wrk-7"));
    assert!(!ours.is_device("vcpu0") && !ours.is_device("net0") && !ours.is_device("slipgate-vmm"));
}

#[test]
fn a_process_has_as_many_rings_as_it_has_descriptors_of_them() {
    let ours = std::process::id();
    assert_eq!(rings(ours), 0);
    // SAFETY: `struct io_uring_params` has 120 bytes, of which zeroes ask for nothing.
    let ring = unsafe {
        let mut params = [0_u64; 15];
        libc::syscall(libc::SYS_io_uring_setup, 1, params.as_mut_ptr())
    };
    // A kernel that forbids it can show no more.
    if ring >= 0 {
        // SAFETY: a descriptor that was just made.
        let ring = unsafe { OwnedFd::from_raw_fd(ring as i32) };
        assert_eq!(rings(ours), 1);
        drop(ring);
        assert_eq!(rings(ours), 0);
    }
}
