//! slipgate under the name of passt, for programs that start that: libvirt's `<backend type='passt'/>`,
//! libkrun's users and muvm.
//!
//! # Theory of operation
//! passt's options are translated into flags of `slipgate attach` ([`translate`]); slipgate's own come by
//! the environment, since those programs have no place for them. In the foreground this process goes on
//! as that command. Otherwise it starts that command in a process group of its own, waits until it is ready, and
//! ends with status 0: libvirt waits for that, then starts the VMM. What the command says until then goes
//! to this process's stderr, and later to `--log-file` or nowhere, so that whoever reads that stderr to its
//! end does not wait for ever.
mod ports;
mod translate;

use std::{
    ffi::{OsStr, OsString},
    fs::{File, OpenOptions},
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::{
            fs::OpenOptionsExt as _,
            process::{CommandExt as _, ExitStatusExt as _},
        },
    },
    path::Path,
    process::{ChildStderr, Command, ExitCode, Stdio},
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::Context as _;
use clap::{Parser as _, error::ErrorKind};
use nix::{
    fcntl::{FcntlArg, OFlag, fcntl},
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use slipgate_broker::EXIT_USAGE;
use slipgate_policy::document::ConfigError;

use crate::{args::PasstArgs, log};

/// The name under which this program is passt, and the command that makes it so.
const NAME: &str = "passt";
/// Variable with more flags of `slipgate attach`, separated by white space.
const FLAGS: &str = "SLIPGATE_PASST_FLAGS";
/// Line of a command that is ready.
const READY: &str = "slipgate: ready";

/// What is to be done in this process.
#[derive(Debug)]
pub(crate) enum Asked {
    /// Go on as `slipgate` with these arguments, without the program's name.
    GoOn(Vec<OsString>),
    /// It was done.
    Done(ExitCode),
}

/// passt's arguments, if this program was started as passt: by its name, or as `slipgate passt`.
pub(crate) fn arguments() -> Option<Vec<OsString>> {
    let all: Vec<OsString> = std::env::args_os().collect();
    let is_passt = |word: &OsString| Path::new(word).file_name() == Some(OsStr::new(NAME));
    match &all[..] {
        [name, rest @ ..] if is_passt(name) => Some(rest.to_vec()),
        [_, command, rest @ ..] if command == NAME => Some(rest.to_vec()),
        _ => None,
    }
}

/// Does what passt was asked for, or says how to go on.
///
/// # Errors
/// The options can't be translated, or the command can't be started.
pub(crate) fn run(arguments: &[OsString]) -> anyhow::Result<Asked> {
    let named = [OsString::from(NAME)].into_iter();
    let args = match PasstArgs::try_parse_from(named.chain(arguments.iter().cloned())) {
        Ok(args) => args,
        Err(e) if e.kind() == ErrorKind::UnknownArgument => {
            log::say(format_args!("{}", e.to_string().trim_end()));
            log::say(format_args!(
                "under the name passt it takes the options that libvirt, libkrun and muvm give; for others \
                 use `slipgate attach --socket`, or passt itself"
            ));
            return Ok(Asked::Done(ExitCode::from(EXIT_USAGE)));
        }
        Err(e) => e.exit(),
    };
    let own = std::env::var_os(FLAGS).unwrap_or_default();
    let own = own
        .to_str()
        .ok_or_else(|| ConfigError::new(FLAGS, own.display(), "it is no UTF-8", "correct it"))?;
    let own: Vec<&str> = own.split_whitespace().collect();
    let flags = translate::flags(&args, &own)?;
    let log_file = args.log_file.as_deref().map(open_log).transpose()?;
    if args.foreground {
        if let Some(file) = &log_file {
            nix::unistd::dup2_stderr(file).context("--log-file: taking it as stderr")?;
        }
        return Ok(Asked::GoOn(flags));
    }
    in_background(&flags, log_file).map(Asked::Done)
}

fn open_log(path: &Path) -> Result<File, ConfigError> {
    let opened = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o640)
        // As with --pid-file: no link is followed, and a FIFO without a reader is not waited for.
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)
        .and_then(|file| match file.metadata()?.is_file() {
            true => Ok(file),
            false => Err(io::Error::other("it is no regular file")),
        });
    opened.map_err(|e| {
        let problem = format!("can't append to it ({e})");
        let remedy = "give a file in a directory that is there and yours";
        ConfigError::new("--log-file", path.display(), problem, remedy)
    })
}

/// Starts the command, and waits until it is ready or has ended.
fn in_background(flags: &[OsString], log_file: Option<File>) -> anyhow::Result<ExitCode> {
    let has_log = log_file.is_some();
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0("slipgate")
        .args(flags)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log_file.map_or_else(Stdio::piped, Stdio::from));
    // A ^C at this process's terminal is not for it.
    command.process_group(0);
    let mut child = command
        .spawn()
        .context("starting the process in the background (/proc/self/exe)")?;
    let messages = child.stderr.take().map(Messages::of).transpose();
    let messages = messages.context("the process's messages")?.map(Arc::new);
    let reader = messages.clone().map(|messages| {
        // It ends with this process.
        std::thread::spawn(move || messages.pass_all_on())
    });
    let stdout = child.stdout.take();
    let mut lines = stdout
        .into_iter()
        .flat_map(|out| BufReader::new(out).lines());
    let is_ready = lines.any(|line| line.is_ok_and(|line| line.starts_with(READY)));
    if is_ready {
        // What was said before may still be in the pipe.
        if let Some(messages) = &messages {
            messages.pass_some_on();
        }
        return Ok(ExitCode::SUCCESS);
    }
    let status = child.wait().context("waiting for the process")?;
    if let Some(reader) = reader {
        // All that write have ended, so this has.
        let _ = reader.join();
    }
    if has_log {
        log::say(format_args!("it has not started: its log file says why"));
    }
    let code = status.code().or(status.signal().map(|signal| 128 + signal));
    Ok(ExitCode::from(code.unwrap_or(1).clamp(1, 255) as u8))
}

/// The pipe with a process's messages, which go on to this process's stderr.
#[derive(Debug)]
struct Messages {
    /// It does not block.
    pipe: File,
    /// Held from a read to the end of its write.
    turn: Mutex<()>,
}

impl Messages {
    fn of(stderr: ChildStderr) -> nix::Result<Self> {
        fcntl(&stderr, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        Ok(Self {
            pipe: OwnedFd::from(stderr).into(),
            turn: Mutex::new(()),
        })
    }

    /// Passes on what there is. Returns whether more may come.
    fn pass_some_on(&self) -> bool {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let mut some = [0; 4_096];
        loop {
            match (&self.pipe).read(&mut some) {
                Ok(0) => return false,
                Ok(len) => {
                    let _ = io::stderr().write_all(&some[..len]);
                }
                Err(e) => return e.kind() == io::ErrorKind::WouldBlock,
            }
        }
    }

    /// Passes all on as it comes.
    fn pass_all_on(&self) {
        while self.pass_some_on() {
            let mut fds = [PollFd::new(self.pipe.as_fd(), PollFlags::POLLIN)];
            let _ = poll(&mut fds, PollTimeout::NONE);
        }
    }
}

#[cfg(test)]
#[path = "passt_test.rs"]
mod tests;
