//! Interrupts a thread that blocks in the guest or in a system call.
//!
//! A signal does both, except in the moment between a thread's last check of its orders and its
//! entry into the guest. There `immediate_exit` of KVM's shared page helps: the signal's handler
//! sets it, on the thread itself, and the next `KVM_RUN` returns at once.
use std::{
    cell::Cell, io, os::unix::thread::JoinHandleExt, ptr, thread::JoinHandle, time::Duration,
};

use kvm_ioctls::VcpuFd;
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler, unblock_signal};

thread_local! {
    /// Pointer to `immediate_exit` of the vCPU that this thread runs; null on other threads.
    static IMMEDIATE_EXIT: Cell<*mut u8> = const { Cell::new(ptr::null_mut()) };
}

/// Installs the signal handler. Must be called once per process, before the first thread that is to
/// be kicked.
pub(crate) fn install() -> io::Result<()> {
    // No SA_RESTART: an interrupted system call must return.
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
    /// Makes the calling thread, which runs `vcpu`, kickable. The vCPU must outlive the guard.
    pub(crate) fn new(vcpu: &mut VcpuFd) -> Self {
        // A thread inherits the signal mask of its creator. The call fails only for numbers that
        // are no signals.
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
    // SAFETY: the thread was neither joined nor detached, so its id is valid, even if it has ended.
    // An error means that it has ended.
    unsafe { libc::pthread_kill(thread.as_pthread_t(), SIGRTMIN()) };
}

/// A thread that can be kicked by those who do not have its handle.
pub(crate) struct Target(libc::pthread_t);

impl Target {
    /// Makes a target of a thread.
    ///
    /// # Safety
    /// The target is dropped before the thread is joined or detached.
    pub(crate) unsafe fn of(thread: &JoinHandle<()>) -> Self {
        Self(thread.as_pthread_t())
    }

    /// Kicks the thread once.
    pub(crate) fn kick(&self) {
        // SAFETY: the thread was neither joined nor detached: see `of`.
        unsafe { libc::pthread_kill(self.0, SIGRTMIN()) };
    }
}

/// Kicks a thread, which has been asked to end, until it ends.
pub(crate) fn until_joined(thread: JoinHandle<()>) {
    /// Time between kicks. A kick may come just before the call that it is to interrupt.
    const AGAIN: Duration = Duration::from_millis(1);
    while !thread.is_finished() {
        kick(&thread);
        std::thread::sleep(AGAIN);
    }
    // The panic hook has reported a panic. Threads that matter to the machine report theirs too.
    let _ = thread.join();
}
