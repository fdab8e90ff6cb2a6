//! A minimal relay, as a lower bound of the cost: two threads per connection, each of which reads
//! up to 64 KiB from one socket and writes them to the other.

use std::{
    env,
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    process::Command,
    thread,
};

use anyhow::{Context, Result};

/// Argument that starts this program as a copy loop.
const ROLE: &str = "copy-loop";
const BUFFER_BYTES: usize = 64 << 10;

/// Returns the command that relays from `listen` to `to`.
pub(super) fn command(listen: &str, to: &str) -> Result<Command> {
    let mut command = Command::new(env::current_exe().context("find this program")?);
    command.args([ROLE, listen, to]);
    Ok(command)
}

/// Relays if this program was started as a copy loop; `None` otherwise.
pub(crate) fn as_copy_loop() -> Option<Result<()>> {
    let mut args = crate::role_arguments(ROLE)?;
    Some((|| {
        let listen = args.next().context("no address to listen at")?;
        let to = args.next().context("no address to connect to")?;
        let listener = TcpListener::bind(&listen).with_context(|| format!("listen at {listen}"))?;
        loop {
            let (client, _) = listener.accept().context("accept")?;
            let to = to.clone();
            thread::spawn(move || relay(client, &to));
        }
    })())
}

fn relay(client: TcpStream, to: &str) -> Result<()> {
    let server = TcpStream::connect(to)?;
    for socket in [&client, &server] {
        socket.set_nodelay(true)?;
    }
    let (from, back) = (client.try_clone()?, server.try_clone()?);
    let up = thread::spawn(move || copy(from, server));
    copy(back, client);
    let _ = up.join();
    Ok(())
}

/// Copies until one of the two sockets is closed or fails.
fn copy(mut from: TcpStream, mut to: TcpStream) {
    let mut buffer = vec![0; BUFFER_BYTES];
    while let Ok(bytes @ 1..) = from.read(&mut buffer) {
        if to.write_all(&buffer[..bytes]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}
