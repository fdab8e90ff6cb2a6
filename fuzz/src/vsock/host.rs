//! The host: programs that connect, and who connects the guest to programs.
use std::{
    collections::{HashMap, VecDeque},
    io::{self, ErrorKind, Read as _, Write as _},
    net::Shutdown,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr, UnixListener, UnixStream},
    },
    process,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use slipgate_vmm::virtio::vsock::{Answer, Connector, MAX_REQUESTS};

/// Returns a byte of the stream with this number.
pub(super) fn pattern(stream: u32, at: u32) -> u8 {
    let mixed = (at ^ stream.wrapping_mul(0x9e37_79b9)).wrapping_mul(0x85eb_ca6b);
    (mixed >> 24) as u8
}

/// Returns bytes of a stream from a place on.
pub(super) fn bytes_of(stream: u32, from: u32, bytes: usize) -> Vec<u8> {
    let places = (0..bytes).map(|at| from.wrapping_add(at as u32));
    places.map(|at| pattern(stream, at)).collect()
}

/// A program of the host.
pub(super) struct Program {
    socket: Option<UnixStream>,
    /// Number of the stream that it writes, and how much of it is written.
    writes: u32,
    wrote: u32,
    /// Number of the stream that it reads, and how much it has; `None`: its bytes are not known.
    reads: Option<u32>,
    got: u32,
    /// The line that comes before, as far as it was read; `None`: none comes.
    line: Option<Vec<u8>>,
    /// It reads no more, or is gone.
    has_ended: bool,
}

impl Program {
    /// `has_line`: whether a line is before the bytes that it reads.
    pub(super) fn new(
        socket: UnixStream,
        writes: u32,
        reads: Option<u32>,
        has_line: bool,
    ) -> Program {
        socket.set_nonblocking(true).expect("a socket");
        Program {
            socket: Some(socket),
            writes,
            wrote: 0,
            reads,
            got: 0,
            line: has_line.then(Vec::new),
            has_ended: false,
        }
    }

    /// Returns the number of the stream that it writes.
    pub(super) fn stream(&self) -> u32 {
        self.writes
    }

    /// Returns how many bytes of its stream it has written.
    pub(super) fn wrote(&self) -> u32 {
        self.wrote
    }

    /// Returns how many bytes of its stream it has read; `None` if it is not known.
    pub(super) fn got(&self) -> Option<u32> {
        self.reads.map(|_| self.got)
    }

    /// Returns whether it still reads.
    pub(super) fn stays(&self) -> bool {
        !self.has_ended
    }

    /// What it reads may be anything from now on.
    pub(super) fn knows_nothing(&mut self) {
        self.reads = None;
    }

    /// Writes so many bytes, or as many as the socket takes.
    pub(super) fn write(&mut self, bytes: usize) {
        let Some(socket) = &mut self.socket else {
            return;
        };
        let all = bytes_of(self.writes, self.wrote, bytes);
        if let Ok(done) = socket.write(&all) {
            self.wrote = self.wrote.wrapping_add(done as u32);
        }
    }

    /// Reads up to so many bytes, which have to be those of its stream. Returns how many there were.
    pub(super) fn read(&mut self, bytes: usize) -> usize {
        let Some(socket) = &mut self.socket else {
            return 0;
        };
        let mut buffer = vec![0; bytes];
        let Ok(done) = socket.read(&mut buffer) else {
            return 0;
        };
        let mut data = &buffer[..done];
        if let Some(line) = &mut self.line {
            let end = data.iter().position(|byte| *byte == b'\n');
            let part = end.map_or(data.len(), |end| end + 1);
            line.extend(&data[..part]);
            data = &data[part..];
            if end.is_some() {
                let line = String::from_utf8_lossy(line);
                let port = line.strip_prefix("OK ").map(str::trim_end);
                assert!(port.is_some_and(|port| port.parse::<u32>().is_ok()));
                self.line = None;
            }
        }
        if let Some(stream) = self.reads {
            let expected = bytes_of(stream, self.got, data.len());
            assert!(data == expected, "other bytes than the guest's");
        }
        self.got = self.got.wrapping_add(data.len() as u32);
        done
    }

    /// Reads all that there is.
    pub(super) fn read_all(&mut self) {
        while self.read(1 << 16) > 0 {}
    }

    pub(super) fn shut(&mut self, direction: Shutdown) {
        self.has_ended |= direction != Shutdown::Write;
        if let Some(socket) = &self.socket {
            // It may be so already.
            let _ = socket.shutdown(direction);
        }
    }

    pub(super) fn close(&mut self) {
        self.has_ended = true;
        self.socket = None;
    }
}

/// Socket at which programs of the host connect.
pub(super) struct Door {
    address: SocketAddr,
}

impl Door {
    pub(super) fn new() -> (Door, UnixListener) {
        let name = format!("slipgate-fuzz-vsock-{}", process::id());
        let address = SocketAddr::from_abstract_name(name).expect("a short name");
        let listener = UnixListener::bind_addr(&address).expect("the name is this process's");
        listener.set_nonblocking(true).expect("a socket");
        (Door { address }, listener)
    }

    /// Connects, and writes this.
    pub(super) fn connect(&self, line: &[u8]) -> UnixStream {
        let mut socket = UnixStream::connect_addr(&self.address).expect("there is room");
        socket.write_all(line).expect("there is room");
        socket
    }
}

/// Who connects the guest to programs, as the input says.
#[derive(Clone, Debug)]
pub(super) struct Connects {
    state: Arc<Mutex<State>>,
    bell: Arc<(UnixStream, UnixStream)>,
}

#[derive(Debug, Default)]
struct State {
    /// Requests without an answer: numbers and ports.
    asked: Vec<(u32, u32)>,
    /// Number of the last request for each port.
    last: HashMap<u32, u32>,
    /// Programs by the numbers of the requests.
    programs: HashMap<u32, usize>,
    answers: VecDeque<Answer>,
    is_gone: bool,
}

impl Connects {
    pub(super) fn new() -> Connects {
        let bell = UnixStream::pair().expect("a pair of sockets");
        for end in [&bell.0, &bell.1] {
            end.set_nonblocking(true).expect("a socket");
        }
        Connects {
            state: Arc::default(),
            bell: Arc::new(bell),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes one of the requests without an answer: its number and port.
    pub(super) fn one(&self, which: u8) -> Option<(u32, u32)> {
        let mut state = self.state();
        let all = state.asked.len();
        (all > 0).then(|| state.asked.remove(usize::from(which) % all))
    }

    pub(super) fn answer(&self, id: u32, program: Option<(OwnedFd, usize)>) {
        let mut state = self.state();
        let socket = program.map(|(socket, number)| {
            state.programs.insert(id, number);
            socket
        });
        state.answers.push_back(Answer { id, socket });
        drop(state);
        self.ring();
    }

    /// Returns the program that the guest gets by its last request for a port.
    pub(super) fn program_at(&self, port: u32) -> Option<usize> {
        let state = self.state();
        state.programs.get(state.last.get(&port)?).copied()
    }

    pub(super) fn go(&self) {
        self.state().is_gone = true;
        self.ring();
    }

    fn ring(&self) {
        // A full one rings too.
        let _ = (&self.bell.1).write(b"!");
    }
}

impl AsFd for Connects {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.0.as_fd()
    }
}

impl Connector for Connects {
    fn ask(&self, id: u32, port: u32) -> io::Result<()> {
        let mut state = self.state();
        if state.is_gone {
            return Err(ErrorKind::BrokenPipe.into());
        }
        state.asked.push((id, port));
        state.last.insert(port, id);
        assert!(state.asked.len() + state.answers.len() <= MAX_REQUESTS);
        Ok(())
    }

    fn next(&self) -> io::Result<Option<Answer>> {
        let mut state = self.state();
        let answer = state.answers.pop_front();
        if answer.is_none() {
            // The bell is quiet until the next answer.
            let _ = (&self.bell.0).read(&mut [0; 512]);
        }
        match answer {
            None if state.is_gone => Err(ErrorKind::UnexpectedEof.into()),
            answer => Ok(answer),
        }
    }
}
