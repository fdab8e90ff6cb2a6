//! Initramfs of a machine: programs of this machine with their shared libraries, modules, folders
//! to mount on.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use super::{Archive, Kernel, QEMU};
use crate::error::{Error, Result, Tried};

/// Where the modules are inside, and the file that lists them in the order to load them.
pub const MODULES: &str = "/modules/order";
/// Where `cargo xtask setup` unpacks it.
pub(super) const BUSYBOX: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../target/kernels/busybox/bin/busybox"
);
/// What the scripts of guests begin with.
const START: &str = include_str!("start.sh");
const DHCP_SCRIPT: &str = include_str!("client_dhcp.sh");
/// Firmware that QEMU needs to boot a kernel on the machine `q35` without a display.
const FIRMWARE: [&str; 3] = ["bios-256k.bin", "kvmvapic.bin", "linuxboot_dma.bin"];
const MOUNT_POINTS: [&str; 5] = ["/dev", "/proc", "/sys", "/run", "/tmp"];

/// An initramfs being put together.
#[derive(Clone, Debug)]
pub struct Initramfs {
    archive: Archive,
}

impl Initramfs {
    /// Makes an initramfs with `program` as its init.
    ///
    /// # Errors
    /// The program or one of its libraries cannot be read.
    pub fn new(program: &Path) -> Result<Self> {
        let mut this = Self::empty();
        this.add("/init", program)?;
        Ok(this)
    }

    /// Makes an initramfs of a guest of the rig's: its init is a script that begins with `. /start`.
    ///
    /// # Errors
    /// There is no busybox here.
    pub fn of_a_guest(script: &str) -> Result<Self> {
        let mut this = Self::with_busybox(script)?;
        this.archive.program("/dhcp", DHCP_SCRIPT.as_bytes());
        this.archive.file("/start", START.as_bytes());
        Ok(this)
    }

    /// Makes an initramfs with a script of Debian's busybox as its init.
    ///
    /// # Errors
    /// There is no busybox here.
    pub fn with_busybox(script: &str) -> Result<Self> {
        let busybox = Path::new(BUSYBOX);
        if !busybox.is_file() {
            return Err(Error::Missing(format!(
                "there is no busybox at {}: `cargo xtask setup` fetches it where there is apt",
                busybox.display()
            )));
        }
        let busybox = fs::read(busybox).tried(format!("read {}", busybox.display()))?;
        let mut this = Self::empty();
        this.archive.program("/init", script.as_bytes());
        this.archive.program("/bin/busybox", &busybox);
        Ok(this)
    }

    fn empty() -> Self {
        let mut archive = Archive::new();
        for folder in MOUNT_POINTS {
            archive.folder(folder);
        }
        Initramfs { archive }
    }

    /// Adds a program of this machine as `/bin/NAME`, with its shared libraries.
    ///
    /// # Errors
    /// The program or one of its libraries cannot be read.
    pub fn program(&mut self, program: &Path) -> Result<()> {
        let Some(name) = program.file_name().and_then(|name| name.to_str()) else {
            return Err(Error::unexpected(format!(
                "{} has no name",
                program.display()
            )));
        };
        self.program_as(name, program)
    }

    /// Adds a program as [`Initramfs::program`] does, under another name.
    ///
    /// # Errors
    /// The program or one of its libraries cannot be read.
    pub fn program_as(&mut self, name: &str, program: &Path) -> Result<()> {
        self.add(&format!("/bin/{name}"), program)
    }

    /// Adds this machine's QEMU with its libraries, and its firmware in this folder (`-L`).
    ///
    /// # Errors
    /// There is no QEMU here, or a file of it can't be read.
    pub fn qemu(&mut self, firmware: &str) -> Result<()> {
        self.program(&on_path(QEMU)?)?;
        let folders = Command::new(QEMU)
            .args(["-L", "help"])
            .stdin(Stdio::null())
            .output()
            .tried(format!("run `{QEMU} -L help`"))?;
        let folders = String::from_utf8_lossy(&folders.stdout).into_owned();
        for name in FIRMWARE {
            let files = folders.lines().map(|folder| Path::new(folder).join(name));
            let file = files.into_iter().find(|file| file.is_file());
            let file = file.ok_or_else(|| {
                Error::Missing(format!("QEMU has no {name} in any of:\n{folders}"))
            })?;
            let contents = fs::read(&file).tried(format!("read {}", file.display()))?;
            self.archive.file(&format!("{firmware}/{name}"), &contents);
        }
        Ok(())
    }

    /// Adds a regular file.
    pub fn file(&mut self, path: &str, contents: &[u8]) {
        self.archive.file(path, contents);
    }

    /// Adds these modules of the kernel and their dependencies. Built-in ones are left out.
    ///
    /// # Errors
    /// A module does not exist, or can't be read.
    pub fn modules(&mut self, kernel: &Kernel, names: &[&str]) -> Result<()> {
        let mut order = String::new();
        for module in kernel.modules(names)? {
            let path = format!("/modules/{}.ko", module.name);
            self.archive.file(&path, &module.image);
            order.push_str(&path);
            order.push('\n');
        }
        self.archive.file(MODULES, order.as_bytes());
        Ok(())
    }

    /// Returns the finished archive.
    pub fn finish(self) -> Vec<u8> {
        self.archive.finish()
    }

    fn add(&mut self, path: &str, program: &Path) -> Result<()> {
        let contents = fs::read(program).tried(format!("read {}", program.display()))?;
        self.archive.program(path, &contents);
        for library in libraries(program)? {
            // A path without links: inside there is one folder only.
            let inside = library.to_string_lossy().into_owned();
            if !self.archive.contains(&inside) {
                let contents = fs::read(&library).tried(format!("read {}", library.display()))?;
                self.archive.program(&inside, &contents);
            }
        }
        Ok(())
    }
}

/// Returns the first program of this name on `PATH`, or in the system's directories that a `PATH` may
/// lack.
///
/// # Errors
/// There is none.
pub fn on_path(program: &str) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin", "/usr/bin", "/bin"].map(PathBuf::from));
    let mut files = folders.map(|folder| folder.join(program));
    files
        .find(|file| file.is_file())
        .ok_or_else(|| Error::Missing(format!("there is no program `{program}` here")))
}

/// Files that the dynamic linker would map for `program`, which is included; none for a static
/// program.
fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let listed = Command::new("ldd")
        .arg(program)
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .output()
        .tried(format!("run `ldd {}`", program.display()))?;
    let text = String::from_utf8_lossy(&listed.stdout);
    if !listed.status.success() {
        let why = String::from_utf8_lossy(&listed.stderr);
        if (text + why.clone()).contains("not a dynamic executable") {
            return Ok(Vec::new());
        }
        return Err(Error::unexpected(format!(
            "`ldd {}`: {}",
            program.display(),
            why.trim()
        )));
    }
    if let Some(missing) = text.lines().find(|line| line.ends_with("not found")) {
        return Err(Error::Missing(format!(
            "{} can't run here: {}",
            program.display(),
            missing.trim()
        )));
    }
    Ok(text.lines().filter_map(library).collect())
}

/// `libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x…)`, `/lib64/ld-linux-x86-64.so.2 (0x…)`.
fn library(line: &str) -> Option<PathBuf> {
    line.split_whitespace()
        .find(|word| word.starts_with('/'))
        .map(PathBuf::from)
}
