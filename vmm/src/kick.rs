//! Interrupts a thread out of what it blocks in: the guest, or a system call.
//!
//! A signal does both, but for the moment between a thread's last look at its orders and its entry
//! into the guest. There `immediate_exit` of KVM's shared page helps: set by the signal's handler,
//! on the thread itself, it makes the next `KVM_RUN` return at once.
use std::{
    cell::Cell, io, os::unix::thread::JoinHandleExt, ptr, thread::JoinHandle, time::Duration,
};

use kvm_ioctls::VcpuFd;
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler, unblock_signal};

thread_local! {
    /// `immediate_exit` of the vCPU that this thread runs; null on other threads.
    static IMMEDIATE_EXIT: Cell<*mut u8> = const { Cell::new(ptr::null_mut()) };
}

/// Once per process, before the first thread that is to be kicked.
pub(crate) fn install() -> io::Result<()> {
    // No SA_RESTART: a system call is to return.
    register_signal_handler(SIGRTMIN(), on_kick).map_err(io::Error::from)
}

extern "C" fn on_kick(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    let immediate_exit = IMMEDIATE_EXIT.get();
    if !immediate_exit.is_null() {
        // SAFETY: set by `Kickable` only, for as long as it borrows the vCPU, on this thread.
        unsafe { immediate_exit.write_volatile(1) };
    }
}

/// While it lives, a kick takes this thread out of the guest and keeps it from entering.
pub(crate) struct Kickable(());

impl Kickable {
    /// For the thread that runs `vcpu`, which must outlive the guard.
    pub(crate) fn new(vcpu: &mut VcpuFd) -> Self {
        // A thread inherits its maker's mask. It fails for numbers that are no signals only.
        let _ = unblock_signal(SIGRTMIN());
        IMMEDIATE_EXIT.set(&raw mut vcpu.get_kvm_run().immediate_exit);
        Self(())
    }
}

impl Drop for Kickable {
    fn drop(&mut self) {
        IMMEDIATE_EXIT.set(ptr::null_mut());
    }
}

/// Kicks a thread once.
pub(crate) fn kick(thread: &JoinHandle<()>) {
    // SAFETY: the thread was neither joined nor detached, so its id is valid, ended or not.
    // An error says that it ended.
    unsafe { libc::pthread_kill(thread.as_pthread_t(), SIGRTMIN()) };
}

/// Kicks a thread, which has been told to end, until it does.
pub(crate) fn until_joined(thread: JoinHandle<()>) {
    /// Between kicks: one may come just before the call that it was to interrupt.
    const AGAIN: Duration = Duration::from_millis(1);
    while !thread.is_finished() {
        kick(&thread);
        std::thread::sleep(AGAIN);
    }
    // A panic was reported by the hook; those that matter to the machine also by their thread.
    let _ = thread.join();
}
