//! `disk`: predictable bytes are written to a disk, or read and checked.
use alloc::{
    format,
    string::{String, ToString as _},
    vec,
};

use crate::{
    json::Object,
    pattern::Pattern,
    pci::Registers,
    virtio::block::{Disk, REQUEST_BYTES, SECTOR_BYTES},
};

/// Does one `disk` workload, and returns its line of output, and whether it passed.
pub fn work<R: Registers + Clone>(
    disk: Option<&mut Disk<R>>,
    (number, writes, bytes): (u32, bool, u64),
) -> (Object, bool) {
    let action = if writes { "write" } else { "check" };
    let line = Object::about("workload", "disk")
        .number("disk", number.into())
        .text("action", action)
        .number("bytes", bytes);
    let done = match disk {
        Some(disk) => {
            let mut pattern = Pattern::new(number.into());
            transfer(disk, &mut pattern, writes, bytes)
        }
        None => Err("there is no such disk".into()),
    };
    match done {
        Ok(()) => (line, true),
        Err(why) => (line.text("error", &why), false),
    }
}

fn transfer<R: Registers + Clone>(
    disk: &mut Disk<R>,
    pattern: &mut Pattern,
    writes: bool,
    bytes: u64,
) -> Result<(), String> {
    if bytes / SECTOR_BYTES as u64 > disk.sectors() {
        return Err(format!("the disk has {} sectors", disk.sectors()));
    }
    let mut done = 0;
    while done < bytes {
        let part = (bytes - done).min(REQUEST_BYTES as u64) as usize;
        let sector = done / SECTOR_BYTES as u64;
        if writes {
            let mut data = vec![0; part];
            pattern.fill(&mut data);
            disk.write(sector, &data).map_err(|e| e.to_string())?;
        } else {
            let data = disk.read(sector, part).map_err(|e| e.to_string())?;
            let wrong = |at| format!("byte {at} is wrong");
            pattern.check(&data).map_err(wrong)?;
        }
        done += part as u64;
    }
    match writes {
        true => disk.flush().map_err(|e| e.to_string()),
        false => Ok(()),
    }
}
