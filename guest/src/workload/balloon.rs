//! `balloon`: memory is given to the host, and used again.
use alloc::{
    string::{String, ToString as _},
    vec::Vec,
};

use crate::{
    command::BalloonWork,
    json::Object,
    pci::Registers,
    platform::Platform,
    virtio::{
        balloon::{Balloon, PAGE_BYTES},
        dma::Dma,
    },
};

/// Memory that is given, taken back or reported at a time, and its pages.
const BLOCK_BYTES: usize = 1 << 20;
const BLOCK_PAGES: usize = BLOCK_BYTES / PAGE_BYTES;
/// Time between looks at what the host asks for.
const LOOK_EVERY_NS: u64 = 2_000_000;
/// What the memory is filled with before it is given, and afterwards.
const BEFORE: u8 = 0x5A;
const AFTER: u8 = 0xA5;

/// Does one `balloon` workload, and returns its line of output, and whether it passed.
pub fn work<R: Registers + Clone>(
    device: Option<&mut Balloon<R>>,
    platform: &impl Platform,
    work: BalloonWork,
) -> (Object, bool) {
    let action = match work {
        BalloonWork::Report { .. } => "report",
        BalloonWork::Follow { .. } => "follow",
    };
    let line = Object::about("workload", "balloon").text("action", action);
    let Some(device) = device else {
        return (line.text("error", "there is no balloon"), false);
    };
    let (line, done) = match work {
        BalloonWork::Report { mib } => report(device, mib, line),
        BalloonWork::Follow { ms } => follow(device, platform, ms, line),
    };
    match done {
        Ok(()) => (line, true),
        Err(why) => (line.text("error", &why), false),
    }
}

/// Fills memory, reports it as free, and uses it again. `lost_pages`: those whose content was lost.
fn report<R: Registers + Clone>(
    device: &mut Balloon<R>,
    mib: u32,
    line: Object,
) -> (Object, Result<(), String>) {
    let mut lost = 0;
    let mut one = |device: &mut Balloon<R>| {
        let mut block = filled().ok_or("there is not so much memory")?;
        device
            .report(&block, BLOCK_BYTES)
            .map_err(|e| e.to_string())?;
        lost += lost_pages(&block);
        used_again(&mut block)?;
        Ok(block)
    };
    // All are held until the end: none is reported twice.
    let blocks: Result<Vec<Dma>, String> = (0..mib).map(|_| one(device)).collect();
    let line = line
        .number("mib", mib.into())
        .number("lost_pages", lost as u64);
    (line, blocks.map(drop))
}

/// Gives what the host asks for, as far as there is memory, and takes it back, until the time is over;
/// then takes all back.
fn follow<R: Registers + Clone>(
    device: &mut Balloon<R>,
    platform: &impl Platform,
    ms: u32,
    line: Object,
) -> (Object, Result<(), String>) {
    let until_ns = platform.now_ns() + u64::from(ms) * 1_000_000;
    let mut held = Vec::new();
    let mut most = 0;
    let mut told = None;
    let mut done = Ok(());
    while platform.now_ns() < until_ns {
        let wanted = device.target() as usize / BLOCK_PAGES;
        let stands = (wanted, held.len());
        if told != Some(stands) {
            match one(device, &mut held, wanted) {
                Ok(true) => {
                    most = most.max(held.len());
                    continue;
                }
                Ok(false) => {}
                Err(why) => {
                    done = Err(why);
                    break;
                }
            }
            told = Some(stands);
            let line = Object::default().number("balloon_mib", held.len() as u64);
            platform.print_line(&line.into_line());
        }
        platform.idle(Some(platform.now_ns() + LOOK_EVERY_NS));
    }
    while done.is_ok() && !held.is_empty() {
        done = one(device, &mut held, 0).map(drop);
    }
    (line.number("most_mib", most as u64), done)
}

/// Gives a block, or takes one back and uses it. Returns whether there was one to give or take.
fn one<R: Registers + Clone>(
    device: &mut Balloon<R>,
    held: &mut Vec<Dma>,
    wanted: usize,
) -> Result<bool, String> {
    if held.len() < wanted {
        let Some(block) = filled() else {
            return Ok(false);
        };
        // All else that needs memory has as much left.
        if Dma::try_new(BLOCK_BYTES).is_none() {
            return Ok(false);
        }
        device
            .give(&block, BLOCK_PAGES)
            .map_err(|e| e.to_string())?;
        held.push(block);
    } else if held.len() > wanted
        && let Some(mut block) = held.pop()
    {
        device
            .take_back(&block, BLOCK_PAGES)
            .map_err(|e| e.to_string())?;
        used_again(&mut block)?;
    } else {
        return Ok(false);
    }
    device.tell((held.len() * BLOCK_PAGES) as u32);
    Ok(true)
}

/// `None`: there is no memory for it.
fn filled() -> Option<Dma> {
    let mut block = Dma::try_new(BLOCK_BYTES)?;
    // SAFETY: the device does not have it yet.
    unsafe { block.bytes_mut(0, BLOCK_BYTES) }.fill(BEFORE);
    Some(block)
}

fn lost_pages(block: &Dma) -> usize {
    // SAFETY: the device has given it back.
    let bytes = unsafe { block.bytes(0, BLOCK_BYTES) };
    let pages = bytes.chunks(PAGE_BYTES);
    pages.filter(|page| page[0] != BEFORE).count()
}

fn used_again(block: &mut Dma) -> Result<(), String> {
    // SAFETY: the device has given it back.
    let bytes = unsafe { block.bytes_mut(0, BLOCK_BYTES) };
    bytes.fill(AFTER);
    match bytes.iter().all(|byte| *byte == AFTER) {
        true => Ok(()),
        false => Err("memory that was taken back does not keep what is written".to_string()),
    }
}
