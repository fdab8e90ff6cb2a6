//! The steps of process 1.

use std::{
    ffi::{CStr, CString},
    fs::{self, File},
    io,
    os::fd::AsRawFd,
    process::{Child, Command, Stdio},
};

use slipgate_testbed::{
    Result,
    error::Tried,
    rig::{COMMAND, EXIT_PORT, FAILED, MODULES, REPORT_DEVICE, WELL},
};

use crate::mount::mount;

const MOUNTS: [(&CStr, &CStr); 5] = [
    (c"proc", c"/proc"),
    (c"sysfs", c"/sys"),
    (c"tmpfs", c"/run"),
    (c"tmpfs", c"/tmp"),
    (c"bpf", c"/sys/fs/bpf"),
];

/// Does all of it and ends the machine.
pub(crate) fn run() -> ! {
    // The kernel mounts devtmpfs by itself only over a real root.
    let well = mount(c"devtmpfs", c"/dev").and_then(|()| check());
    if let Err(error) = &well {
        // The console; the report may not be there yet.
        eprintln!("slipgate-rig-init: {error}");
    }
    end_machine(if matches!(well, Ok(true)) {
        WELL
    } else {
        FAILED
    })
}

fn check() -> Result<bool> {
    for (kind, place) in MOUNTS {
        mount(kind, place)?;
    }
    load_modules()?;
    let _first_users = crate::static_keys::take_into_use()?;
    let report = || File::options().write(true).open(REPORT_DEVICE);
    let what = || format!("open {REPORT_DEVICE}");
    make_raw(&report().tried(what())?);
    let checks = Command::new("/proc/self/exe")
        .arg(crate::CHECKS)
        .env("PATH", "/bin")
        .env("SLIPGATE_BIN", "/bin/slipgate")
        .stdin(Stdio::null())
        .stdout(report().tried(what())?)
        .stderr(report().tried(what())?)
        .spawn()
        .tried("start the checks")?;
    reap_until_ended(&checks).tried("wait for the checks")
}

/// Runs the command that the initramfs gives in place of the checks; `None` without one.
pub(crate) fn given() -> Option<bool> {
    let command = fs::read_to_string(COMMAND).ok()?;
    let mut words = command.split_whitespace();
    let status = Command::new(words.next()?).args(words).status();
    match &status {
        Ok(status) => println!("`{command}` ended with {status}"),
        Err(error) => println!("could not start `{command}`: {error}"),
    }
    Some(status.is_ok_and(|status| status.success()))
}

/// Loads the initramfs' modules, in their order.
pub(crate) fn load_modules() -> Result<()> {
    let order = fs::read_to_string(MODULES).tried(format!("read {MODULES}"))?;
    for path in order.lines() {
        let what = || format!("load the module {path}");
        let file = File::open(path).tried(what())?;
        let none = CString::default();
        // SAFETY: an open file, and parameters that are NUL-terminated.
        let loaded =
            unsafe { libc::syscall(libc::SYS_finit_module, file.as_raw_fd(), none.as_ptr(), 0) };
        match done(loaded) {
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => {}
            other => other.tried(what())?,
        }
    }
    Ok(())
}

/// Lines go out as they are written.
pub(crate) fn make_raw(terminal: &File) {
    // SAFETY: termios is plain data, for which zeroes are valid; the calls fill and read it.
    unsafe {
        let mut settings: libc::termios = std::mem::zeroed();
        if libc::tcgetattr(terminal.as_raw_fd(), &raw mut settings) == 0 {
            libc::cfmakeraw(&raw mut settings);
            libc::tcsetattr(terminal.as_raw_fd(), libc::TCSANOW, &raw const settings);
        }
    }
}

/// Takes every child that ends, as an init must. Whether `awaited` ended with 0.
fn reap_until_ended(awaited: &Child) -> io::Result<bool> {
    loop {
        let mut status = 0;
        // SAFETY: the status is writable.
        let ended = unsafe { libc::waitpid(-1, &raw mut status, 0) };
        done(ended.into())?;
        if ended as u32 == awaited.id() {
            return Ok(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0);
        }
    }
}

/// QEMU's `isa-debug-exit`; without it, the kernel's panic at init's end ends the machine.
fn end_machine(status: u8) -> ! {
    if let Ok(report) = File::options().write(true).open(REPORT_DEVICE) {
        // SAFETY: waits until all is sent.
        unsafe { libc::tcdrain(report.as_raw_fd()) };
    }
    write_port(status);
    std::process::exit(status.into())
}

#[cfg(target_arch = "x86_64")]
fn write_port(status: u8) {
    // SAFETY: leave to use one I/O port, for this process alone.
    let leave = unsafe { libc::syscall(libc::SYS_ioperm, libc::c_ulong::from(EXIT_PORT), 1, 1) };
    match done(leave) {
        // SAFETY: one byte to a port at which there is nothing but QEMU's exit device.
        Ok(()) => unsafe { std::arch::asm!("out dx, al", in("dx") EXIT_PORT, in("al") status) },
        Err(error) => eprintln!("slipgate-rig-init: ioperm: {error}"),
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn write_port(_: u8) {
    eprintln!("slipgate-rig-init: no port {EXIT_PORT:#x} on this machine");
}

fn done(value: libc::c_long) -> io::Result<()> {
    match value {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
