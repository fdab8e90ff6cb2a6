//! bzImage: a compressed Linux kernel with a decompression stub, behind 16-bit setup code and a
//! header.
//!
//! Only the header and the stub are used. The stub is loaded at the address the kernel prefers and
//! entered in 64-bit mode. `init_size` bytes from that address on must be free for it to decompress
//! the kernel.
use linux_loader::bootparam::{LOADED_HIGH, XLF_KERNEL_64, setup_header};
use vm_memory::ByteValued;

use super::{
    BootError, Placed, Protocol,
    image::{Image, check_place},
};
use crate::GuestMemory;

/// Offset of the setup header, in the file and in `boot_params`.
const HEADER: u64 = 0x1F1;
/// Offset of the setup header's magic in the file.
const MAGIC: u64 = 0x202;
/// Oldest boot protocol that has `xloadflags`: 2.12, Linux 3.8.
const MIN_VERSION: u16 = 0x20C;
/// Offset of the 64-bit entry from the start of the loaded code.
const ENTRY_64: u64 = 0x200;

pub(super) fn is_bzimage(image: &Image<'_>) -> bool {
    let mut magic = [0; 4];
    image.read_at(MAGIC, &mut magic, "the magic").is_ok() && magic == *b"HdrS"
}

pub(super) fn load(memory: &GuestMemory, image: &Image<'_>) -> Result<Placed, BootError> {
    let header = read_header(image)?;
    let setup_sectors = if header.setup_sects == 0 {
        4
    } else {
        u64::from(header.setup_sects)
    };
    let offset = (setup_sectors + 1) * 512;
    // `syssize` counts units of 16 bytes. A signature may follow the code.
    let code = u64::from(header.syssize) * 16;
    let rest = image.size().saturating_sub(offset);
    if rest < code || rest <= ENTRY_64 {
        let end = offset + code.max(ENTRY_64 + 1);
        return Err(BootError::Truncated {
            what: "the packed kernel",
            end,
            size: image.size(),
        });
    }
    let start = header.pref_address;
    let taken = check_place(memory, start, rest.max(u64::from(header.init_size)))?;
    image.copy_to(memory, start, offset, rest, "the packed kernel")?;
    Ok(Placed {
        entry: start + ENTRY_64,
        protocol: Protocol::Linux64,
        taken,
        initrd_last: header.initrd_addr_max.into(),
        max_command_line: header.cmdline_size as usize,
        header: Some(header),
    })
}

/// Reads the part of the setup header that this kernel has, by the length in its jump instruction.
/// Fields that the kernel is too old to have stay zero.
fn read_header(image: &Image<'_>) -> Result<setup_header, BootError> {
    let mut jump = [0; 1];
    image.read_at(0x201, &mut jump, "the setup header")?;
    let length = (MAGIC - HEADER) as usize + usize::from(jump[0]);
    let mut header = setup_header::default();
    let known = length.min(size_of::<setup_header>());
    image.read_at(
        HEADER,
        &mut header.as_mut_slice()[..known],
        "the setup header",
    )?;
    let what = if header.version < MIN_VERSION {
        "has a boot protocol older than 2.12"
    } else if header.loadflags & LOADED_HIGH == 0 {
        "is to be loaded below 1 MiB"
    } else if header.xloadflags & XLF_KERNEL_64 == 0 {
        "has no 64-bit entry (it may be a 32-bit kernel)"
    } else {
        return Ok(header);
    };
    Err(BootError::BzImage { what })
}
