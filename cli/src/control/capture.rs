//! `slipgate capture`: packets of one live flow, or of a VM, as pcapng.
//!
//! The engine writes to one end of a socket pair that is made here. The data from the other end is
//! written block by block, so that the file is complete whenever it ends.
use std::{
    fs::OpenOptions,
    io::{self, IsTerminal as _, Read as _, Write},
    os::{
        fd::AsFd as _,
        unix::{fs::OpenOptionsExt as _, net::UnixStream},
    },
};

use anyhow::{Context as _, anyhow, bail};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::signalfd::SignalFd,
};
use slipgate_ipc::{
    client::{ClientAnswer, Target},
    engine::EngineRequest,
};
use slipgate_model::RelayedId;
use userspace_nat::observe::NotCaptured;

use super::{cut::target, stop_signals};
use crate::{
    args::CaptureArgs,
    brokers::{ANOTHER_ANSWER, ask_each, of_engine},
    log::say,
};

/// Argument that selects stdout.
const STDOUT: &str = "-";
/// Type and length at a block's begin, the length again at its end (draft-ietf-opsawg-pcapng
/// section 3.1).
const BLOCK_LEN: usize = 12;
/// Longest block that the engine makes, bytes.
const MOST_BLOCK_LEN: usize = 1 << 17;
/// Reads after ^C: more than a socket holds, by Linux's default.
const LAST_READS: usize = 8;
/// Type of an enhanced packet block.
const PACKET: u32 = 6;
/// Type of an interface statistics block.
const STATISTICS: u32 = 5;

/// Captures until the end that was asked for, or ^C.
pub(crate) fn run(args: &CaptureArgs) -> anyhow::Result<()> {
    let (what, name) = match (&args.flow, &args.vm) {
        (Some(flow), _) if RelayedId::parse(flow).is_some() => {
            return Err(anyhow!("{flow}: {}", NotCaptured::Relayed));
        }
        (Some(flow), _) => match target(flow) {
            what @ Target::Flow(_) => (what, flow),
            Target::Vm(_) => bail!(
                "{flow:?} is no flow's id, as `slipgate flows` shows them (like 5f3a91c2-17-3); \
                 for all of a VM's give --vm {flow}"
            ),
        },
        (None, Some(vm)) => (Target::Vm(vm.clone()), vm),
        (None, None) => bail!("nothing to capture is named: give a flow's id, or --vm NAME"),
    };
    let to_stdout = args
        .output
        .as_deref()
        .is_none_or(|path| path.as_os_str() == STDOUT);
    if to_stdout && io::stdout().is_terminal() {
        bail!("packets are no text for a terminal: give -o FILE, or pipe them to `tcpdump -nr -`");
    }
    let (ours, theirs) = UnixStream::pair().context("making a pair of sockets")?;
    let capture = EngineRequest::Capture {
        to: theirs.as_fd(),
        packets: args.count,
        seconds: args.seconds,
    };
    match ask_each(&args.pin_dir, &of_engine(what, capture))? {
        Ok(ClientAnswer::Done) => {}
        Ok(_) => bail!(ANOTHER_ANSWER),
        Err(asked) => return Err(asked.error(name)),
    }
    drop(theirs);
    // Only now: a capture that is refused leaves the file of an earlier one as it is.
    let mut out: Box<dyn Write> = match &args.output {
        Some(path) if !to_stdout => Box::new(
            OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .open(path)
                .with_context(|| format!("writing to {}", path.display()))?,
        ),
        _ => Box::new(io::stdout().lock()),
    };
    let signals = stop_signals().context("waiting for signals")?;
    let mut blocks = Blocks::default();
    copy(ours, &signals, &mut blocks, &mut out)?;
    out.flush().context("writing packets")?;
    let lost = match blocks.lost {
        0 => String::new(),
        lost => format!(", {lost} lost because they were not read fast enough"),
    };
    say(format_args!("{} packets{lost}", blocks.packets));
    Ok(())
}

fn copy(
    mut from: UnixStream,
    signals: &SignalFd,
    blocks: &mut Blocks,
    to: &mut dyn Write,
) -> anyhow::Result<()> {
    let mut bytes = vec![0; 1 << 16];
    let mut last_reads = LAST_READS;
    loop {
        let mut fds = [
            PollFd::new(from.as_fd(), PollFlags::POLLIN),
            PollFd::new(signals.as_fd(), PollFlags::POLLIN),
        ];
        match poll(&mut fds, PollTimeout::NONE) {
            Err(nix::Error::EINTR) => continue,
            other => other.context("waiting for packets")?,
        };
        // What came before ^C is had still; a flow that goes on could fill the socket for ever.
        let stopped = fds[1].any().unwrap_or(true);
        if stopped {
            from.set_nonblocking(true).context("reading packets")?;
            last_reads -= 1;
            if last_reads == 0 {
                return Ok(());
            }
        }
        let n = match from.read(&mut bytes) {
            Ok(0) => return Ok(()),
            Err(e) if stopped && e.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            other => other.context("reading packets")?,
        };
        let whole = blocks.take(&bytes[..n])?;
        match to.write_all(whole).and_then(|()| to.flush()) {
            Ok(()) => {}
            // Who reads has seen enough.
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
            Err(e) => return Err(e).context("writing packets"),
        }
        blocks.written();
    }
}

/// A stream of pcapng cut into blocks.
#[derive(Debug, Default)]
struct Blocks {
    buffer: Vec<u8>,
    whole: usize,
    packets: u64,
    lost: u64,
}

impl Blocks {
    /// Adds received bytes; returns all blocks that are complete now.
    fn take(&mut self, bytes: &[u8]) -> anyhow::Result<&[u8]> {
        self.buffer.extend_from_slice(bytes);
        while let Some(block) = self.next()? {
            self.whole += block;
        }
        Ok(&self.buffer[..self.whole])
    }

    /// Removes the blocks that were written.
    fn written(&mut self) {
        self.buffer.drain(..self.whole);
        self.whole = 0;
    }

    /// The length of the next block, if all of it is there.
    fn next(&mut self) -> anyhow::Result<Option<usize>> {
        let rest = &self.buffer[self.whole..];
        let word = |at: usize| {
            let bytes = rest.get(at..at + 4)?;
            Some(u32::from_le_bytes(bytes.try_into().ok()?))
        };
        let Some((kind, len)) = word(0).zip(word(4)) else {
            return Ok(None);
        };
        let len = len as usize;
        if !(BLOCK_LEN..=MOST_BLOCK_LEN).contains(&len) {
            bail!("the engine sent a block of {len} bytes, which is none");
        }
        if rest.len() < len {
            return Ok(None);
        }
        match kind {
            PACKET => self.packets += 1,
            STATISTICS => self.lost += dropped(&rest[..len]),
            _ => {}
        }
        Ok(Some(len))
    }
}

/// `isb_ifdrop` of an interface statistics block.
fn dropped(block: &[u8]) -> u64 {
    const IF_DROP: u16 = 5;
    let mut at = 20; // header, interface, time
    while let Some(head) = block.get(at..at + 4) {
        let code = u16::from_le_bytes([head[0], head[1]]);
        let len = usize::from(u16::from_le_bytes([head[2], head[3]]));
        let value = block.get(at + 4..at + 4 + len);
        if code == IF_DROP
            && let Some(value) = value.and_then(|v| v.try_into().ok())
        {
            return u64::from_le_bytes(value);
        }
        if code == 0 {
            break;
        }
        at += 4 + len.next_multiple_of(4);
    }
    0
}

#[cfg(test)]
#[path = "capture_test.rs"]
mod tests;
