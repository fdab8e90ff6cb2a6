//! Learning from a running VM.
//!
//! The engine writes its records of the VM to one end of a socket pair that is made here: first the
//! live flows, then each line as it comes. At the end this side is shut for writing, and the
//! records that still wait in the engine follow, with the number of lost ones. With `--open` the
//! broker has the other end of another pair, and opens the VM for as long as this end is open:
//! however this process ends, the kernel closes it.
use std::{
    io::{ErrorKind, Read as _},
    net::Shutdown,
    os::{
        fd::{AsFd as _, BorrowedFd},
        unix::net::UnixStream,
    },
    path::Path,
    time::Duration,
};

use anyhow::{Context as _, bail};
use slipgate_ipc::{
    client::{ClientAnswer, ClientRequest, Target},
    engine::EngineRequest,
};

use slipgate_policy::tools::flow_log::{Reader, Seen};

use super::Wait;
use crate::{
    args::LearnArgs,
    brokers::{ANOTHER_ANSWER, ask_each, of_engine},
    log::say,
};

/// Time limit for the engine to send the remaining records.
const REST_WITHIN: Duration = Duration::from_secs(5);
/// Time limit for the broker to close a VM that it opened.
const CLOSED_WITHIN: Duration = Duration::from_secs(30);
/// Maximum number of bytes that are read before ^C and the time are checked.
const MOST_AT_ONCE: usize = 4 << 20;
/// Longest line that is a record, bytes.
const MOST_LINE: usize = 1 << 20;

/// Listens until ^C, or for the given time.
pub(super) fn listen(
    args: &LearnArgs,
    vm: &str,
    each: &mut dyn FnMut(Seen),
) -> anyhow::Result<Reader> {
    // ^C is to print what was learnt, from now on.
    let mut wait = Wait::begin(args)?;
    let stream = ask(&args.pin_dir, vm, |to| {
        of_engine(Target::Vm(vm.to_owned()), EngineRequest::Record { to })
    })?;
    let mut records = Records::of(stream);
    let open = match args.open {
        true => Some(ask(&args.pin_dir, vm, |lifeline| ClientRequest::Open {
            vm: vm.to_owned(),
            lifeline,
        })?),
        false => None,
    };
    say(format_args!(
        "listening to {vm}{}; ^C prints what was learnt",
        match open {
            Some(_) => ", which is open meanwhile",
            None => "",
        }
    ));
    loop {
        let end = wait.until(Some(records.stream.as_fd()), None)?;
        if !records.read(each)? {
            bail!("slipgate or its engine has ended, or serves {vm} no more");
        }
        if end {
            break;
        }
    }
    if let Some(open) = open {
        close(open, vm)?;
    }
    records.finish(each)?;
    Ok(records.reader)
}

/// Ends the opening of the VM, and waits until its own policy is in force again.
fn close(mut open: UnixStream, vm: &str) -> anyhow::Result<()> {
    // It fails when the broker has gone just now: then nothing is open.
    let _ = open.shutdown(Shutdown::Write);
    open.set_read_timeout(Some(CLOSED_WITHIN))?;
    match open.read(&mut [0; 1]) {
        Err(e) if e.kind() == ErrorKind::WouldBlock => bail!(
            "{vm} did not get its own policy back within {} s: see slipgate's messages",
            CLOSED_WITHIN.as_secs()
        ),
        _ => Ok(()),
    }
}

/// Sends the request, with one end of a socket pair, to the broker that serves the VM. Returns the
/// other end.
fn ask(
    pin_dir: &Path,
    vm: &str,
    request: impl for<'f> FnOnce(BorrowedFd<'f>) -> ClientRequest<BorrowedFd<'f>>,
) -> anyhow::Result<UnixStream> {
    let (ours, theirs) = UnixStream::pair().context("making a pair of sockets")?;
    match ask_each(pin_dir, &request(theirs.as_fd()))? {
        Ok(ClientAnswer::Done) => Ok(ours),
        Ok(_) => bail!(ANOTHER_ANSWER),
        Err(asked) => Err(asked.error(vm)),
    }
}

/// Stream of records from the engine.
struct Records {
    stream: UnixStream,
    /// Beginning of a line whose end has not come.
    partial: Vec<u8>,
    reader: Reader,
}

impl Records {
    fn of(stream: UnixStream) -> Self {
        Self {
            stream,
            partial: Vec::new(),
            reader: Reader::default(),
        }
    }

    /// Reads the available records without waiting; returns `false` at the end.
    fn read(&mut self, each: &mut dyn FnMut(Seen)) -> anyhow::Result<bool> {
        self.stream.set_nonblocking(true)?;
        self.take(each, MOST_AT_ONCE)
    }

    /// Requests the end of the records from the engine, and reads the remaining ones.
    fn finish(&mut self, each: &mut dyn FnMut(Seen)) -> anyhow::Result<()> {
        // It fails when the engine has gone just now: then there is nothing more.
        let _ = self.stream.shutdown(Shutdown::Write);
        self.stream.set_nonblocking(false)?;
        self.stream.set_read_timeout(Some(REST_WITHIN))?;
        if self.take(each, usize::MAX)? {
            bail!(
                "the engine did not send the rest within {} s",
                REST_WITHIN.as_secs()
            );
        }
        Ok(())
    }

    fn take(&mut self, each: &mut dyn FnMut(Seen), most: usize) -> anyhow::Result<bool> {
        let mut bytes = vec![0; 1 << 16];
        let mut taken = 0;
        while taken < most {
            let n = match self.stream.read(&mut bytes) {
                Ok(0) => return Ok(false),
                Ok(n) => n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(true),
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                // Gone without taking what we said, which is nothing.
                Err(e) if e.kind() == ErrorKind::ConnectionReset => return Ok(false),
                Err(e) => return Err(e).context("reading records"),
            };
            taken += n;
            self.partial.extend_from_slice(&bytes[..n]);
            let mut begin = 0;
            while let Some(len) = self.partial[begin..].iter().position(|b| *b == b'\n') {
                let line = String::from_utf8_lossy(&self.partial[begin..begin + len]);
                if let Some(seen) = self.reader.line(&line) {
                    each(seen);
                }
                begin += len + 1;
            }
            self.partial.drain(..begin);
            if self.partial.len() > MOST_LINE {
                bail!("the engine sent a line of more than {MOST_LINE} bytes, which is no record");
            }
        }
        Ok(true)
    }
}
