//! A client of the HTTP API of `slipgate serve`, by its Unix socket.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::error::{Error, Result, Tried};

/// The API ends a connection on which no request comes for 10 s.
const KEPT_FOR: Duration = Duration::from_secs(5);

/// A connection to the API, on which requests are made one after another.
pub struct ApiClient {
    socket: PathBuf,
    connection: BufReader<UnixStream>,
    asked_at: Instant,
}

/// An answer of the API.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ApiAnswer {
    /// Status code of HTTP.
    pub status: u16,
    /// The body; empty where there is none.
    pub body: String,
}

impl ApiAnswer {
    /// Whether the request was carried out (2xx).
    pub fn is_success(&self) -> bool {
        self.status / 100 == 2
    }
}

impl ApiClient {
    /// Connects to the socket of `--api` or `--api-read`.
    ///
    /// # Errors
    /// Nobody listens there.
    pub fn connect(socket: &Path) -> Result<Self> {
        Ok(Self {
            socket: socket.to_owned(),
            connection: connect(socket)?,
            asked_at: Instant::now(),
        })
    }

    /// Makes a request, and waits for its answer. A connection that was not used for a while is
    /// made again.
    ///
    /// # Errors
    /// The connection ends, or the answer is no HTTP with a Content-Length.
    pub fn ask(&mut self, method: &str, path: &str, body: &str) -> Result<ApiAnswer> {
        if self.asked_at.elapsed() > KEPT_FOR {
            self.connection = connect(&self.socket)?;
        }
        let what = || format!("{method} {path}");
        let length = body.len();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: slipgate\r\nContent-Length: {length}\r\n\r\n{body}"
        );
        let sent = self.connection.get_mut().write_all(request.as_bytes());
        sent.tried(what())?;
        let status = self.line().tried(what())?;
        let code = status.split(' ').nth(1).and_then(|code| code.parse().ok());
        let no_http = || Error::unexpected(format!("{}: the answer {status:?} is no HTTP", what()));
        let code = code.ok_or_else(no_http)?;
        let mut length = 0;
        loop {
            let line = self.line().tried(what())?.to_ascii_lowercase();
            if line.is_empty() {
                break;
            }
            if let Some(value) = line.strip_prefix("content-length:") {
                length = value.trim().parse().map_err(|_| no_http())?;
            }
        }
        let mut body = vec![0; length];
        self.connection.read_exact(&mut body).tried(what())?;
        self.asked_at = Instant::now();
        Ok(ApiAnswer {
            status: code,
            body: String::from_utf8_lossy(&body).into_owned(),
        })
    }

    fn line(&mut self) -> std::io::Result<String> {
        let mut line = String::new();
        match self.connection.read_line(&mut line)? {
            0 => Err(std::io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(line.trim_end().to_owned()),
        }
    }
}

/// Asks for events by a path such as `/v1/events?kind=wake`, and receives each as it comes. None that comes
/// from now on is missed.
///
/// # Errors
/// Nobody listens at the socket, or what listens sends no whole head.
pub fn events(socket: &Path, path: &str) -> Result<mpsc::Receiver<Value>> {
    let what = || format!("GET {path}");
    let mut connection = connect(socket)?;
    let request = format!("GET {path} HTTP/1.0\r\nHost: slipgate\r\n\r\n");
    let sent = connection.get_mut().write_all(request.as_bytes());
    sent.tried(what())?;
    let mut lines = connection.lines();
    // The head is there: events are read from now on.
    loop {
        let no_head = || Error::unexpected(format!("{}: the answer has no head", what()));
        let line = lines.next().ok_or_else(no_head)?.tried(what())?;
        if line.is_empty() {
            break;
        }
    }
    let (sender, events) = mpsc::channel();
    thread::spawn(move || {
        let events = lines.map_while(std::io::Result::ok);
        for event in events.filter_map(|line| serde_json::from_str(&line).ok()) {
            if sender.send(event).is_err() {
                break;
            }
        }
    });
    Ok(events)
}

fn connect(socket: &Path) -> Result<BufReader<UnixStream>> {
    let stream = UnixStream::connect(socket);
    let what = || format!("connect to the API at {}", socket.display());
    Ok(BufReader::new(stream.tried(what())?))
}
