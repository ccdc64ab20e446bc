"""Keys and certificates of this process: generated, or read from files named in the environment.

A generated certificate has no authority: the proof of the handshake covers it, which authenticates it to
holders of the job's secret.  With a user-defined authority, both sides present a certificate signed by it;
the proof covers that of the server too.  Names in certificates are not checked, since the proof is stronger
and ranks only know addresses of each other.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import re
import ssl
from collections.abc import Iterator

from ... import config
from ...errors import ConfigurationError
from .stream import TlsConfig

#: validity of a certificate before and after its creation; not checked by shoal, but by tools
_VALID = datetime.timedelta(days=3650)


#: maximum size of a file of keys or certificates
_MAX_BYTES = 1 << 20


def tls_config(*, connecting: bool) -> TlsConfig:
    """Return the TLS configuration of one side; a listener gets a new key, or that of the environment.

    Raises ConfigurationError if ``cryptography`` is not installed, or a file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if connecting else ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    files = config.tls_files()
    context.verify_mode = ssl.CERT_NONE if files is None else ssl.CERT_REQUIRED
    digest = b"" if files is None else _load_files(context, files)
    if connecting:
        return TlsConfig(context)  # without files, the proof of the handshake verifies the other side
    context.num_tickets = 0  # no session is resumed
    if files is None:
        certificate, key = _generate()
        _load(context, certificate, key)
        digest = _digest(certificate)
    return TlsConfig(context, digest)


def _load_files(context: ssl.SSLContext, files: config.TlsFiles) -> bytes:
    """Load authority, certificate and key into ``context``; return the SHA-256 of the certificate."""
    authority = _read(config.TLS_CA, files.ca)
    certificate = _read(config.TLS_CERT, files.cert)
    key = _read(config.TLS_KEY, files.key)
    try:
        context.load_verify_locations(cadata=authority.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise _refused(config.TLS_CA, files.ca, "no certificates", error) from None
    try:
        digest = _digest(certificate)
        _load(context, certificate, key)
    except (ssl.SSLError, ValueError) as error:
        both = f"{config.TLS_KEY.name}={files.key!r}: no certificate with its key, without a password"
        raise _refused(config.TLS_CERT, files.cert, f"with {both}", error) from None
    return digest


def _read(variable: config.Variable[str | None], path: str) -> bytes:
    try:
        return config.read_file(path, _MAX_BYTES)
    except OSError as error:
        raise ConfigurationError(
            f"{variable.name}={path!r} cannot be read: {error.strerror or error}"
        ) from None


def _refused(
    variable: config.Variable[str | None], path: str, expected: str, error: Exception
) -> ConfigurationError:
    why = (getattr(error, "reason", None) or str(error)).lower().replace("_", " ")
    return ConfigurationError(f"{variable.name}={path!r} {expected}, in PEM ({why})")


def _digest(certificates: bytes) -> bytes:
    """Return the SHA-256 of the first certificate.  ValueError: there is none."""
    found = re.search(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", certificates, re.DOTALL)
    if found is None:
        raise ValueError("no certificate")
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(found[0].decode("ascii"))).digest()


def _load(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """Load a certificate (with its chain) and its key into ``context``.

    OpenSSL only reads them from files; these are memory files without a name that other processes could open.
    """
    with _in_memory(certificate) as certificate_path, _in_memory(key) as key_path:
        # A key with a password would make OpenSSL ask at the terminal.
        context.load_cert_chain(certificate_path, key_path, password=b"")


@contextlib.contextmanager
def _in_memory(data: bytes) -> Iterator[str]:
    fd = -1
    try:
        try:
            fd = os.memfd_create("shoal-tls", os.MFD_CLOEXEC)
            with open(fd, "wb", closefd=False) as file:
                file.write(data)
        except OSError as error:
            raise ConfigurationError(
                f"{config.TLS.name}=1: no memory for a certificate: {error.strerror or error}"
            ) from error
        yield f"/proc/self/fd/{fd}"
    finally:
        if fd >= 0:
            os.close(fd)


def _generate() -> tuple[bytes, bytes]:
    """Generate a certificate and its key, in PEM."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise ConfigurationError(
            f"{config.TLS.name}=1 needs the package cryptography to generate a certificate: "
            f"pip install 'shoal[tls]', or set {config.TLS_CA.name}, {config.TLS_CERT.name} and "
            f"{config.TLS_KEY.name} ({error})"
        ) from None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "shoal")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _VALID)
        .not_valid_after(now + _VALID)
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM), key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
