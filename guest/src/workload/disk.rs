//! `disk`: predictable bytes are written to a disk, or read and checked, in order or at random; its
//! start is discarded or made zeroes.
mod log;
mod scatter;

use alloc::{
    format,
    string::{String, ToString as _},
    vec,
};

use crate::{
    command::DiskWork,
    histogram::Histogram,
    json::Object,
    pattern::{Pattern, split_mix_64},
    pci::Registers,
    platform::Platform,
    virtio::block::{BLOCK_BYTES, Disk, Done, REQUEST_BYTES, SECTOR_BYTES, Work},
};

/// Does one `disk` workload, and returns its line of output, and whether it passed.
pub fn work<R: Registers + Clone>(
    disk: Option<&mut Disk<R>>,
    platform: &impl Platform,
    (number, work, bytes): (u32, DiskWork, u64),
) -> (Object, bool) {
    let action = match work {
        DiskWork::Write => "write",
        DiskWork::Check => "check",
        DiskWork::Discard => "discard",
        DiskWork::Zero => "zero",
        DiskWork::Random { .. } => "random",
        DiskWork::Log { .. } => "log",
        DiskWork::Scatter { .. } => "scatter",
    };
    let line = Object::about("workload", "disk")
        .number("disk", number.into())
        .text("action", action)
        .number("bytes", bytes);
    let line = match work {
        DiskWork::Random { count, at_once } => line
            .number("count", count.into())
            .number("at_once", at_once.into()),
        DiskWork::Log { every, at_once } => line
            .number("every", every.into())
            .number("at_once", at_once.into()),
        DiskWork::Scatter { every, at_once } => line
            .number("count", bytes / BLOCK_BYTES as u64)
            .number("every", every.into())
            .number("at_once", at_once.into()),
        _ => line,
    };
    let mut flushes = None;
    let started_ns = platform.now_ns();
    let mut latency = Histogram::default();
    let done = match disk {
        Some(disk) if bytes / SECTOR_BYTES as u64 > disk.sectors() => {
            Err(format!("the disk has {} sectors", disk.sectors()))
        }
        Some(disk) => {
            let seed = u64::from(number);
            let mut took = |ns| latency.record(ns);
            match work {
                DiskWork::Random { count, at_once } => {
                    let blocks = bytes / BLOCK_BYTES as u64;
                    read_at_random(disk, platform, (seed, blocks), (count, at_once), &mut took)
                }
                DiskWork::Log { every, at_once } => {
                    let blocks = bytes / BLOCK_BYTES as u64;
                    log::log(disk, platform, (seed, blocks), (every, at_once), &mut took)
                }
                DiskWork::Scatter { every, at_once } => {
                    let (range, how) = ((seed, bytes / BLOCK_BYTES as u64), (every, at_once));
                    let done = scatter::scatter(disk, platform, range, how, &mut took);
                    done.map(|number| flushes = Some(number))
                }
                DiskWork::Discard | DiskWork::Zero => {
                    let sectors = (bytes / SECTOR_BYTES as u64) as u32;
                    let asked_ns = platform.now_ns();
                    let done = match work {
                        DiskWork::Discard => disk.discard(sectors),
                        _ => disk.write_zeroes(sectors),
                    };
                    took(platform.now_ns() - asked_ns);
                    done.map_err(|e| e.to_string())
                }
                DiskWork::Write | DiskWork::Check => {
                    let writes = work == DiskWork::Write;
                    let mut pattern = Pattern::new(seed);
                    transfer(disk, platform, &mut pattern, (writes, bytes), &mut took)
                }
            }
        }
        None => Err("there is no such disk".into()),
    };
    let took_ns = platform.now_ns() - started_ns;
    match done {
        Ok(()) => {
            let line = match flushes {
                Some(number) => line.number("flushes", number),
                None => line,
            };
            let line = line
                .microseconds("took_us", took_ns)
                .microseconds("p50_us", latency.quantile_ns(500))
                .microseconds("p99_us", latency.quantile_ns(990));
            (line, true)
        }
        Err(why) => (line.text("error", &why), false),
    }
}

/// Calls `took` with the time of each request.
fn transfer<R: Registers + Clone>(
    disk: &mut Disk<R>,
    platform: &impl Platform,
    pattern: &mut Pattern,
    (writes, bytes): (bool, u64),
    took: &mut impl FnMut(u64),
) -> Result<(), String> {
    let mut done = 0;
    while done < bytes {
        let part = (bytes - done).min(REQUEST_BYTES as u64) as usize;
        let sector = done / SECTOR_BYTES as u64;
        if writes {
            let mut data = vec![0; part];
            pattern.fill(&mut data);
            let asked_ns = platform.now_ns();
            disk.write(sector, &data).map_err(|e| e.to_string())?;
            took(platform.now_ns() - asked_ns);
        } else {
            let asked_ns = platform.now_ns();
            let data = disk.read(sector, part).map_err(|e| e.to_string())?;
            took(platform.now_ns() - asked_ns);
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

/// Reads blocks at random places among the first `blocks`, `at_once` at a time, and checks them.
/// Calls `took` with the time of each.
fn read_at_random<R: Registers + Clone>(
    disk: &mut Disk<R>,
    platform: &impl Platform,
    (seed, blocks): (u64, u64),
    (count, at_once): (u32, u16),
    took: &mut impl FnMut(u64),
) -> Result<(), String> {
    let mut reads = disk.blocks(at_once);
    // When each read was asked for, by its place.
    let mut asked_ns = vec![0; usize::from(at_once)];
    let (mut begun, mut ended) = (0_u32, 0_u32);
    while ended < count {
        while begun < count && reads.room() > 0 {
            let block = split_mix_64(begun.into()) % blocks;
            let asked = platform.now_ns();
            let place = reads.read(block).map_err(|e| e.to_string())?;
            asked_ns[place] = asked;
            begun += 1;
        }
        reads.publish();
        let Done { place, work } = reads.wait().map_err(|e| e.to_string())?;
        took(platform.now_ns() - asked_ns[place]);
        let Work::Read(block) = work else {
            continue;
        };
        let mut due = Pattern::at(seed, block * BLOCK_BYTES as u64);
        let wrong = |at| format!("byte {at} is wrong");
        due.check(reads.data(place)).map_err(wrong)?;
        reads.release(place);
        ended += 1;
    }
    Ok(())
}
