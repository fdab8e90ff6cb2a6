//! The init of a guest that measures its disk: it is process 1, does the work that the initramfs gives,
//! says it on the console, and turns the machine off.

use std::{
    fs::{self, File},
    io::Write as _,
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
    thread::sleep,
    time::{Duration, Instant},
};

use slipgate_testbed::{
    Error, Result,
    error::Tried,
    rig::{DISK_DEVICE, DISK_WORK, DiskLine, DiskWork},
};

use crate::{
    boot::{load_modules, make_raw},
    mount::mount,
};

const CONSOLE: &str = "/dev/console";
const CLOCK: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
/// Time for the driver to find the disk, on a machine that is emulated twice.
const APPEARS: Duration = Duration::from_secs(60);

/// Does the work and ends the machine, if the initramfs gives some.
pub(crate) fn run_if_wanted() {
    let Ok(text) = fs::read_to_string(DISK_WORK) else {
        return;
    };
    if let Err(why) = work(&text) {
        let why = why.to_string();
        // A console that can't be opened is missed by who reads it.
        let _ = console().map(|mut console| say(&mut console, &DiskLine::Failed { why }));
    }
    // SAFETY: it takes no memory; with success it does not return. All that was to be stable is.
    unsafe { libc::reboot(libc::RB_POWER_OFF) };
}

fn work(text: &str) -> Result<()> {
    // The kernel mounts devtmpfs by itself only over a real root.
    mount(c"devtmpfs", c"/dev")?;
    mount(c"sysfs", c"/sys")?;
    load_modules()?;
    let work = DiskWork::of_text(text)?;
    let clock = fs::read_to_string(CLOCK).tried(format!("read {CLOCK}"))?;
    let mut console = console()?;
    make_raw(&console);
    work.run(&open_disk()?, clock.trim(), |line| say(&mut console, &line))
}

fn console() -> Result<File> {
    let console = File::options().write(true).open(CONSOLE);
    console.tried(format!("open {CONSOLE}"))
}

fn say(console: &mut File, line: &DiskLine) {
    // Who waits for it notices that it is missing. In one call, so that the kernel's lines are beside it.
    let _ = console.write_all(format!("{line}\n").as_bytes());
}

/// Opens the disk for requests of its driver's own, past the guest's page cache.
fn open_disk() -> Result<File> {
    let until = Instant::now() + APPEARS;
    while !Path::new(DISK_DEVICE).exists() {
        if Instant::now() > until {
            let why = format!("the driver has found no {DISK_DEVICE}");
            return Err(Error::unexpected(why));
        }
        sleep(Duration::from_millis(10));
    }
    let mut options = File::options();
    options.read(true).write(true).custom_flags(libc::O_DIRECT);
    options
        .open(DISK_DEVICE)
        .tried(format!("open {DISK_DEVICE}"))
}
