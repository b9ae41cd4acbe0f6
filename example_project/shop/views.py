"""The shop's pages."""

import math

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.http import require_POST

from django_distlock import LockLost, LockNotAcquired, distlock, lock_backends
from shop import payments
from shop.models import Payment, Product, Report
from shop.reports import report_in_progress


def start(request: HttpRequest) -> HttpResponse:
    """Show what there is, and which locks are held now."""
    return render(
        request,
        "shop/start.html",
        {
            "products": Product.objects.order_by("name"),
            "payments": Payment.objects.order_by("customer"),
            "locks": lock_backends["default"].list().records,
            "report": Report.objects.order_by("day").last(),
            "report_in_progress": report_in_progress(timezone.localdate()),
        },
    )


@require_POST
def capture(request: HttpRequest, pk: int) -> HttpResponse:
    """Capture a payment, unless somebody is doing so."""
    user = request.user.get_username() or "a visitor"
    try:
        with distlock(f"payment:{pk}", wait=0.5, metadata={"user": user}) as lease:
            captured = payments.capture(pk, lease)
    except LockNotAcquired as error:
        return busy(request, error)
    except (LockLost, payments.TooLate):
        messages.error(request, "It took too long, and somebody else may have captured it.")
        return redirect("start")
    except Payment.DoesNotExist:
        raise Http404 from None
    messages.success(
        request, "The payment was captured." if captured else "It was captured before."
    )
    return redirect("start")


@require_POST
async def sell(request: HttpRequest, pk: int) -> HttpResponse:
    """Sell one piece, in the asynchronous way."""
    try:
        async with distlock(f"product:{pk}", wait=2):
            product = await Product.objects.aget(pk=pk)
            product.stock -= 1
            await product.asave(update_fields=["stock"])
    except LockNotAcquired as error:
        return busy(request, error)
    except Product.DoesNotExist:
        raise Http404 from None
    messages.success(request, f"Sold one {product.name}.")
    return redirect("start")


def busy(request: HttpRequest, error: LockNotAcquired) -> HttpResponse:
    """Answer that somebody else is at it, and when to come back at the latest."""
    # A key is free one second after its lease ended, should nobody release it before.
    seconds = 1 + math.ceil(max(0, error.expires_in or 0))
    response = render(request, "shop/busy.html", {"error": error, "seconds": seconds}, status=409)
    response["Retry-After"] = str(seconds)
    return response
