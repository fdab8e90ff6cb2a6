use std::{
    collections::HashMap,
    io::{BufRead, BufReader, Write},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    os::fd::AsFd,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use super::{Running, STOP_POLL};
use crate::{
    error::{Result, Tried},
    netns::NetNs,
    sockets,
};

/// A tiny HTTP/1.1 server: GET of fixed bodies by path, one request a connection; stops on drop.
pub struct HttpServer {
    address: SocketAddr,
    _running: Running,
}

impl HttpServer {
    /// Serves `pages` (path to body) on `address` in `ns` (port 0: any).
    ///
    /// # Errors
    /// The address cannot be bound.
    pub fn start(
        ns: &NetNs,
        (ip, port): (impl Into<IpAddr>, u16),
        pages: HashMap<String, Vec<u8>>,
    ) -> Result<HttpServer> {
        let address = SocketAddr::new(ip.into(), port);
        let what = || format!("serve HTTP on {address} in {ns:?}");
        let listener = ns.run(|| TcpListener::bind(address)).tried(what())?;
        let address = listener.local_addr().tried(what())?;
        let mut running = Running::default();
        let (stop, pages) = (running.stop.clone(), Arc::new(pages));
        running.threads.push(ns.thread("http-server", move || {
            while !stop.load(Ordering::SeqCst) {
                let wait_ms = STOP_POLL.as_millis() as i32;
                let ready = sockets::poll(&listener.as_fd(), libc::POLLIN, wait_ms);
                if !matches!(ready, Ok(events) if events & libc::POLLIN != 0) {
                    continue;
                }
                let Ok((stream, _)) = listener.accept() else {
                    continue;
                };
                let pages = pages.clone();
                std::thread::spawn(move || serve(stream, &pages));
            }
        }));
        Ok(HttpServer {
            address,
            _running: running,
        })
    }

    /// The address it listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

fn serve(mut stream: TcpStream, pages: &HashMap<String, Vec<u8>>) -> std::io::Result<()> {
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let request = lines.next().transpose()?.unwrap_or_default();
    for line in lines {
        if line?.is_empty() {
            break;
        }
    }
    let mut words = request.split(' ');
    let page = match (words.next(), words.next()) {
        (Some("GET"), Some(path)) => pages.get(path),
        _ => None,
    };
    let (status, body) = page.map_or(("404 Not Found", &b"not here"[..]), |body| ("200 OK", body));
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body)
}
